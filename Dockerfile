# Runs the quick tests. Not yet built: where it was written there was no Docker.
#
#   docker build --tag accelerate-recipes . && docker run --shm-size 1g accelerate-recipes
#
# launchers/kubernetes/Dockerfile is the image for training.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
# Without CUDA: remove this line for the build of torch with it.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
WORKDIR /workspace
COPY . .
RUN make .venv/installed
CMD ["make", "quick"]
