# The gateway in a container:  docker build -t signal-gateway .     docker run --rm signal-gateway token
# Its arguments are the gateway's. Its settings come from the environment, or from gateway.json in a folder at /config.

FROM node:24-alpine AS node-amd64
FROM node:24-alpine AS node-arm64
# Newer lines have no image for 32-bit ARM.
FROM node:22-alpine AS node-arm

# Without its types the file takes a quarter less memory. A release puts its own gateway.mjs in place of this stage.
FROM node-${TARGETARCH:-amd64} AS compiled
COPY gateway.ts /
RUN ["node", "--no-warnings", "--eval", "\
  const { stripTypeScriptTypes } = process.getBuiltinModule('module'); \
  fs.writeFileSync('/gateway.mjs', stripTypeScriptTypes(fs.readFileSync('/gateway.ts', 'utf8')))"]

# Without BuildKit there is no TARGETARCH, and Docker pulls the image for its own machine.
FROM node-${TARGETARCH:-amd64}
LABEL org.opencontainers.image.title="signal-gateway" \
  org.opencontainers.image.description="An authenticating gateway for signal-cli-rest-api" \
  org.opencontainers.image.licenses="MIT"
COPY --from=compiled /gateway.mjs /
# The gateway reads gateway.json in this folder. Mount a folder here, because a file that is mounted alone does not follow an
# editor.
WORKDIR /config
# By number, so that Kubernetes can see that it is not root. The image's name for it is "node".
USER 1000
ENV GATEWAY_LISTEN=:8880
EXPOSE 8880
# Only the gateway's process is checked. With TLS, or another port, give the container a check of its own.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["wget", "-qO-", "http://127.0.0.1:8880/healthz"]
# The option halves the memory after many sends: see "Which Node" in docs/install.md.
ENTRYPOINT ["node", "--max-semi-space-size=4", "/gateway.mjs"]
