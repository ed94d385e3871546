// The receiver of OTLP over HTTP that the OpenTelemetry Collector has, with a consumer that prints what it understood: a line for each
// request, with its path and the document as the Collector itself would write it. It runs until it is killed.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatalf("usage: %s ADDRESS:PORT", os.Args[0])
	}
	if err := run(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func run(address string) error {
	var turn sync.Mutex
	write := func(path string, document []byte, err error) error {
		if err != nil {
			return err
		}
		turn.Lock()
		defer turn.Unlock()
		_, err = fmt.Printf("%s %s\n", path, document)
		return err
	}
	logs, err := consumer.NewLogs(func(_ context.Context, logs plog.Logs) error {
		document, err := (&plog.JSONMarshaler{}).MarshalLogs(logs)
		return write("/v1/logs", document, err)
	})
	if err != nil {
		return err
	}
	traces, err := consumer.NewTraces(func(_ context.Context, traces ptrace.Traces) error {
		document, err := (&ptrace.JSONMarshaler{}).MarshalTraces(traces)
		return write("/v1/traces", document, err)
	})
	if err != nil {
		return err
	}

	factory := otlpreceiver.NewFactory()
	config := factory.CreateDefaultConfig()
	wanted := confmap.NewFromStringMap(map[string]any{
		"protocols": map[string]any{"http": map[string]any{"endpoint": address}},
	})
	if err := wanted.Unmarshal(config); err != nil {
		return err
	}
	ctx := context.Background()
	settings := receiver.Settings{
		ID:                component.NewID(factory.Type()),
		TelemetrySettings: componenttest.NewNopTelemetrySettings(),
		BuildInfo:         component.NewDefaultBuildInfo(),
	}
	// The receiver of both kinds is one server.
	forLogs, err := factory.CreateLogs(ctx, settings, config, logs)
	if err != nil {
		return err
	}
	forTraces, err := factory.CreateTraces(ctx, settings, config, traces)
	if err != nil {
		return err
	}
	for _, part := range []component.Component{forLogs, forTraces} {
		if err := part.Start(ctx, componenttest.NewNopHost()); err != nil {
			return err
		}
	}
	select {}
}
