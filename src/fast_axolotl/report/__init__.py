"""How results are shown: tables in the terminal. Makes no measurement of its own."""
