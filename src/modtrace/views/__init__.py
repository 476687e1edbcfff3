"""How the answers of the analyses look."""
