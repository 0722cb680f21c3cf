# A CPU image with the command `diffpure`, which works in /work as a user without rights:
#   docker build --tag diffpure .
#   docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" diffpure demo --out out
# The service needs one more extra: docs/serve.md says how to add it.
FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
ENV OMP_WAIT_POLICY=passive MPLCONFIGDIR=/tmp/matplotlib DIFFPURE_CACHE=/tmp/diffpure
COPY constraints.txt /tmp/
# torch first, from its CPU index, and held by constraints.txt after that: nothing pulls the CUDA packages.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY --from=wheel /dist /tmp/dist
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/dist/*.whl && rm -r /tmp/dist
RUN useradd --create-home --uid 1000 diffpure && install --directory --owner diffpure /work
USER diffpure
WORKDIR /work
ENTRYPOINT ["diffpure"]
CMD ["--help"]
