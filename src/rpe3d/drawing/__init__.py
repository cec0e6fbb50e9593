"""How things look: the colours of laws, and what plots share. Knows nothing of laws but their names."""
