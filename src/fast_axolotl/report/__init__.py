"""How results are shown: in the terminal, live, as Markdown, as one HTML file. Measures nothing."""
