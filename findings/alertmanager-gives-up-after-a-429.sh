#!/usr/bin/env bash
# Guess: Alertmanager repeats a notification that was answered with 429 or 408, after the seconds of Retry-After. It
# drops it, as after each 4xx, until the next group_interval; after a 5xx it repeats, and Retry-After counts for
# nothing.
# Seen with Alertmanager 0.35.0 (its webhook receiver, as a Go module).
# A gateway with a rate loses the alerts above it if it says so with 429, and a storm of alerts is just when that
# happens. The page about Alertmanager should say that its token needs no rate, or a wide one.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
command -v go >/dev/null || { echo 'no go here'; exit 2; }
cd "$dir" || exit 2
have go mod init finding
have go get github.com/prometheus/alertmanager/notify/webhook@v0.35.0
cat >main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"

	"github.com/prometheus/alertmanager/alert"
	"github.com/prometheus/alertmanager/notify"
	"github.com/prometheus/alertmanager/notify/webhook"
	"github.com/prometheus/alertmanager/template"
	commoncfg "github.com/prometheus/common/config"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v2"
)

// notified runs Alertmanager's own webhook receiver, configured by the text of its block, with one alert.
func notified(block, summary string) notify.NotifyVerdict {
	config := webhook.WebhookConfig{}
	if err := yaml.Unmarshal([]byte(block), &config); err != nil {
		panic(err)
	}
	config.HTTPConfig = &commoncfg.HTTPClientConfig{}
	templates, err := template.FromGlobs(nil)
	if err != nil {
		panic(err)
	}
	templates.ExternalURL = &url.URL{}
	notifier, err := webhook.New(&config, templates, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	ctx := notify.WithReceiverName(notify.WithGroupKey(context.Background(), "x"), "x")
	annotations := model.LabelSet{"summary": model.LabelValue(summary)}
	return notifier.Notify(ctx, &alert.Alert{Alert: model.Alert{Annotations: annotations}})
}

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, _ := strconv.Atoi(r.URL.Path[1:])
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(status)
	}))
	for _, status := range []int{201, 400, 401, 408, 425, 429, 500, 502, 503, 504} {
		verdict := notified(fmt.Sprintf("url: %s/%d", server.URL, status), "disk full")
		fmt.Printf("%d: failed=%t repeats=%t after=%v\n", status, verdict.Err() != nil, verdict.ShouldRetry(), verdict.Delay())
	}
}
GO
have go mod tidy
timeout 250 go run . 2>"$dir/log" | tee seen
diff seen - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
201: failed=false repeats=false after=0s
400: failed=true repeats=false after=0s
401: failed=true repeats=false after=0s
408: failed=true repeats=false after=0s
425: failed=true repeats=false after=0s
429: failed=true repeats=false after=0s
500: failed=true repeats=true after=0s
502: failed=true repeats=true after=0s
503: failed=true repeats=true after=0s
504: failed=true repeats=true after=0s
SEEN
