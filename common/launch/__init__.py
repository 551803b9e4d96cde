"""How the processes of a run start and join, and what is checked before they do."""
