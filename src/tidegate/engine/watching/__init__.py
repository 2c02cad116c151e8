"""What watches a run from inside, or roots from outside: metrics for Prometheus, and traces over OTLP."""
