"""Results, their form as JSON, and how people read them: tables, pages, the terminal."""
