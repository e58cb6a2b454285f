.PHONY: setup demo test lint bench faults docs screenshots gpu
setup demo test lint bench faults docs screenshots gpu:
	@python3 tasks.py $@
