#!/usr/bin/env bash
# Guess: in the `payload` of Alertmanager's webhook_configs a quoted text is a text, whatever its template gives.
# Alertmanager reads the result as YAML once more: "+15550100001" becomes a number without its plus, `disk: full` an
# object, `no` false, and of `[FIRING] disk full` only a list with FIRING is left. `| toJson` is what keeps a text a
# text.
# Seen with Alertmanager 0.35.0 (its webhook receiver, as a Go module).
# A payload with the fields of a send works until an alert has a colon in it. A gateway should name the type that it
# got; a page should have Alertmanager's own JSON, or `toJson` on each line.
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
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"

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

const payload = `payload:
  recipients: ["+15550100001"]
  message: "{{ .CommonAnnotations.summary }}"
`
const withToJson = `payload:
  recipients: ['"+15550100001"']
  message: "{{ .CommonAnnotations.summary | toJson }}"
`

func main() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Println(strings.TrimSpace(string(body)))
	}))
	for _, summary := range []string{"disk full", "disk: full", "[FIRING] disk full", "- disk full", "0123", "no"} {
		fmt.Print(summary, " is ")
		notified("url: "+server.URL+"\n"+payload, summary)
	}
	fmt.Print("[FIRING] disk: full | toJson is ")
	notified("url: "+server.URL+"\n"+withToJson, "[FIRING] disk: full")
}
GO
have go mod tidy
timeout 250 go run . 2>"$dir/log" | tee seen
diff seen - <<'SEEN' || { cat "$dir/log"; echo CHANGED; exit 1; }
disk full is {"message":"disk full","recipients":[15550100001]}
disk: full is {"message":{"disk":"full"},"recipients":[15550100001]}
[FIRING] disk full is {"message":["FIRING"],"recipients":[15550100001]}
- disk full is {"message":["disk full"],"recipients":[15550100001]}
0123 is {"message":83,"recipients":[15550100001]}
no is {"message":false,"recipients":[15550100001]}
[FIRING] disk: full | toJson is {"message":"[FIRING] disk: full","recipients":["+15550100001"]}
SEEN
