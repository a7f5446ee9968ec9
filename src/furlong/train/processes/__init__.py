"""The processes of a run: how they begin, agree, are watched and end."""
