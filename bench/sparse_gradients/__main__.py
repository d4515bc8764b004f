"""python -m bench.sparse_gradients"""

from bench.sparse_gradients.links import main

if __name__ == "__main__":
    main()
