.PHONY: setup demo test lint bench gpu
setup demo test lint bench gpu:
	@python3 tasks.py $@
