"""How things look: colours, and what plots share. Knows nothing of laws."""
