"""Pictures of graphs in the language of graphviz, and the program that draws them."""
