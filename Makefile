.PHONY: setup demo test lint bench screenshots gpu
setup demo test lint bench screenshots gpu:
	@python3 tasks.py $@
