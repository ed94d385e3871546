//! Arguments that all commands share, as in kubectl: which Services, and how the answer is written.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{FalseyValueParser, PossibleValuesParser, TypedValueParser};

use super::bpffs::BpffsArgs;
use crate::question;
use crate::value;

/// How an answer is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text: a table, or lines.
    #[default]
    Text,
    /// Text with more columns or details.
    Wide,
    /// Only names, one per line.
    Name,
    /// JSON, with stable field names.
    Json,
    /// YAML, with the fields of JSON.
    Yaml,
    /// Only warnings and failures, one per line.
    Short,
    /// OpenTelemetry log records: OTLP/JSON, one document per line, as the OTLP file exporter writes them.
    Otlp,
}

impl Output {
    /// The formats of every command.
    const COMMON: &'static [Self] = &[Self::Text, Self::Wide, Self::Name, Self::Json, Self::Yaml];

    /// Whether more details are requested.
    pub const fn is_wide(self) -> bool {
        matches!(self, Self::Wide)
    }

    /// Whether the output is a document for programs.
    pub const fn is_document(self) -> bool {
        matches!(self, Self::Json | Self::Yaml | Self::Otlp)
    }

    /// Whether the output is for people.
    pub const fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::Wide)
    }

    /// Returns the parser of `--output` of a command that accepts these formats besides the common ones.
    pub(super) fn parser(others: &'static [Self]) -> impl TypedValueParser<Value = Self> {
        Self::parser_of(Self::COMMON.iter().chain(others))
    }

    /// Returns the parser of `--output` of a command that accepts only these formats.
    pub(super) fn parser_of(
        all: impl IntoIterator<Item = &'static Self>,
    ) -> impl TypedValueParser<Value = Self> {
        let all = all.into_iter().filter_map(Self::to_possible_value);
        PossibleValuesParser::new(all).try_map(|word| Self::from_str(&word, true))
    }
}

/// What every list takes that is read from the maps.
#[derive(Clone, Debug, clap::Args)]
pub struct ListOptions {
    /// The maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The list.
    #[command(flatten)]
    pub view: ViewArgs,
}

/// How an answer is written.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct OutputArgs {
    /// Output format.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text", value_parser = Output::parser(&[]))]
    pub output: Output,
}

/// How a list is written.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct FormatArgs {
    /// The format.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Print the table without headers.
    #[arg(long, env = "BALLAST_NO_HEADERS", value_parser = FalseyValueParser::new())]
    pub no_headers: bool,
}

/// How a list is written, sorted and followed.
#[derive(Clone, Debug, clap::Args)]
pub struct ViewArgs {
    /// How it is written.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Sort by this field of the JSON output, or by the column of this name.
    #[arg(long, env = "BALLAST_SORT_BY", value_name = "FIELD")]
    pub sort_by: Option<String>,
    /// After the list, print each row that is added or changed, until the command is interrupted.
    #[arg(short, long, env = "BALLAST_WATCH", value_parser = FalseyValueParser::new())]
    pub watch: bool,
    /// With --watch: print ADDED, MODIFIED or DELETED in front of each row. Without this flag, deleted rows are not printed.
    #[arg(long, env = "BALLAST_OUTPUT_WATCH_EVENTS", value_parser = FalseyValueParser::new())]
    pub output_watch_events: bool,
    /// With --watch: exit when standard input is closed. `kubectl exec -i` closes it when it is interrupted, but does not
    /// stop the process.
    #[arg(long, env = "BALLAST_END_WITH_STDIN", value_parser = FalseyValueParser::new())]
    pub end_with_stdin: bool,
    /// With --watch: how often the rows are read. A number without unit means seconds.
    #[arg(
        long,
        env = "BALLAST_INTERVAL",
        value_name = "DURATION",
        default_value = "1s",
        value_parser = question::period
    )]
    pub interval: Duration,
}

/// In which namespace a Service is.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct NamespaceArgs {
    /// Only Services of this namespace. Without it, lists show all namespaces, and a name without namespace is in `default`.
    #[arg(short, long, env = "BALLAST_NAMESPACE", value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// All namespaces; overrides --namespace. Also searches all namespaces for a name without namespace.
    #[arg(short = 'A', long, env = "BALLAST_ALL_NAMESPACES", value_parser = FalseyValueParser::new())]
    pub all_namespaces: bool,
}

/// Which Services a command is about.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SelectorArgs {
    /// The namespace.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// Only Services with these labels, like `app=web,tier!=test`. The labels are read from the API server, because the maps
    /// have none.
    #[arg(short = 'l', long, env = "BALLAST_SELECTOR", value_name = "LABELS")]
    pub selector: Option<String>,
    /// The API server.
    #[command(flatten)]
    pub api: ApiArgs,
    /// Only these Services: NAME, NAMESPACE/NAME, svc/NAME or service/NAME, each with or without :PORT (a name or number).
    #[arg(value_name = "SERVICE")]
    pub services: Vec<String>,
}

/// How the API server is reached.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ApiArgs {
    /// File with the API server's address and credentials. Default: $KUBECONFIG or ~/.kube/config, then
    /// the pod's service account.
    #[arg(long, env = "BALLAST_KUBECONFIG", value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub kubeconfig: Option<PathBuf>,
    /// Comma-separated URLs of the API servers, instead of the one in the kubeconfig.
    #[arg(long, env = "BALLAST_MASTER", value_name = "URL", value_delimiter = ',', value_parser = value::api_server)]
    pub master: Vec<String>,
}
