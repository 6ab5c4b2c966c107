// A plain OpenTelemetry Collector with the components that the files of collector/ name, and no others: the tests
// validate and run those files with it. Of the versions that Jaeger is built of, so that nothing is compiled twice.
// For use take otelcol-contrib, which has these and many more.
package main

import (
	"log"

	"github.com/open-telemetry/opentelemetry-collector-contrib/connector/spanmetricsconnector"
	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/kafkaexporter"
	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/prometheusexporter"
	"github.com/open-telemetry/opentelemetry-collector-contrib/extension/healthcheckv2extension"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/filterprocessor"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/envprovider"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/confmap/provider/yamlprovider"
	"go.opentelemetry.io/collector/connector"
	"go.opentelemetry.io/collector/connector/forwardconnector"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/otlpexporter"
	"go.opentelemetry.io/collector/extension"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/batchprocessor"
	"go.opentelemetry.io/collector/processor/memorylimiterprocessor"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

// By type, as a file names it.
func byType[F component.Factory](factories ...F) map[component.Type]F {
	found := make(map[component.Type]F, len(factories))
	for _, factory := range factories {
		found[factory.Type()] = factory
	}
	return found
}

func components() (otelcol.Factories, error) {
	return otelcol.Factories{
		Extensions: byType[extension.Factory](healthcheckv2extension.NewFactory()),
		Receivers:  byType[receiver.Factory](otlpreceiver.NewFactory()),
		Processors: byType[processor.Factory](
			batchprocessor.NewFactory(),
			filterprocessor.NewFactory(),
			memorylimiterprocessor.NewFactory(),
			tailsamplingprocessor.NewFactory(),
		),
		Exporters: byType[exporter.Factory](
			kafkaexporter.NewFactory(),
			otlpexporter.NewFactory(),
			prometheusexporter.NewFactory(),
		),
		Connectors: byType[connector.Factory](
			forwardconnector.NewFactory(),
			spanmetricsconnector.NewFactory(),
		),
		Telemetry: otelconftelemetry.NewFactory(),
	}, nil
}

func main() {
	command := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol", Description: "OpenTelemetry Collector"},
		Factories: components,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{
			ResolverSettings: confmap.ResolverSettings{
				ProviderFactories: []confmap.ProviderFactory{
					envprovider.NewFactory(),
					fileprovider.NewFactory(),
					yamlprovider.NewFactory(),
				},
			},
		},
	})
	if err := command.Execute(); err != nil {
		log.Fatal(err)
	}
}
