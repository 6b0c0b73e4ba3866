# `outrider serve` in a container. The compiler builds the kernels. With another index of packages, such as one whose torch has
# no CUDA: docker build --build-arg PIP_EXTRA_INDEX_URL=... .
# Set OUTRIDER_API_KEYS, or name what clients call the server: docker run ... outrider MODEL --allowed-host llm.example.com. Without
# either it answers to localhost and to the container's own address alone.
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m venv /opt/outrider \
    && /opt/outrider/bin/pip install --no-cache-dir -c /src/constraints.txt '/src[serve,grammar]'

FROM python:3.11-slim
RUN useradd --create-home outrider
COPY --from=build /opt/outrider /opt/outrider
USER outrider
EXPOSE 8000
ENTRYPOINT ["/opt/outrider/bin/outrider", "serve", "--host", "0.0.0.0"]
