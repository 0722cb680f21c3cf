"""Images for the defence: every reader gives float32 NCHW in [0, 1] and int64 labels."""
