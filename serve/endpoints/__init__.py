"""The endpoints of the server.

An endpoint is a module: the bodies that it accepts and returns, its routes, and their descriptions for `/openapi.json`.
Its function `routes` is listed here.
"""

from . import chat, completions, drafter, health, messages, models, responses, tokens, weights

KEYED = (
    chat.routes,
    completions.routes,
    responses.routes,
    messages.routes,
    models.routes,
    tokens.routes,
    drafter.routes,
)  # ask for an API key
OPEN = (health.routes,)
ADMIN = (weights.routes, drafter.admin_routes)  # ask for an admin key
