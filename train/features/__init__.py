"""Hidden states of the target: computed, kept, and what memory they take."""
