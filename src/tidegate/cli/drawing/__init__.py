"""Drawing a DAG: where everything stands (layout), then as text, SVG or Mermaid."""
