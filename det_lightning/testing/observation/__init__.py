"""What a trial does, reads and keeps while it trains."""
