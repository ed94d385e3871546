//! Tests every list with every flag, from the words of the command line to the output.

use super::*;
use crate::cli::origins::Origin;
use crate::cli::selector::SelectInMaps as _;
use proxy_cli::args::inspect::{BackendCommand, FlowCommand, MapCommand, ServiceCommand};
use proxy_cli::args::list::SelectorArgs;
use proxy_cli::selector::AskLabels;
use serde_json::{Value, json};

/// A list: its words, the name of its rows in JSON, and the fields of columns whose cells have units or words.
struct Listing {
    words: &'static [&'static str],
    group: &'static str,
    fields: &'static [(&'static str, &'static str)],
}

const LISTS: [Listing; 7] = [
    Listing {
        words: &["service", "list"],
        group: "frontends",
        fields: &[("address", "address"), ("affinity", "affinitySeconds"), ("service-id", "serviceId")],
    },
    Listing { words: &["backend", "list"], group: "backends", fields: &[("open", "open"), ("id", "id")] },
    Listing {
        words: &["flow", "list"],
        group: "flows",
        fields: &[("age", "ageSeconds"), ("idle", "idleSeconds"), ("timeout", "timeoutSeconds")],
    },
    Listing {
        words: &["stats"],
        group: "services",
        fields: &[("bytes", "bytes"), ("reply-bytes", "replyBytes"), ("refused", "refused")],
    },
    Listing {
        words: &["map", "list"],
        group: "maps",
        fields: &[("memory", "memory"), ("used", "used"), ("capacity", "capacity")],
    },
    Listing { words: &["map", "dump", "services"], group: "entries", fields: &[] },
    Listing { words: &["config", "--defaults"], group: "settings", fields: &[] },
];

/// The API server's answer: `web/shop` has every label.
const ASK: AskLabels = |_, _| Ok(BTreeSet::from([("web".to_owned(), "shop".to_owned())]));

/// Returns [`cluster`] with numbers that are sorted differently as numbers and as text.
fn counted() -> Snapshot {
    let mut snapshot = cluster();
    for (id, bytes) in [(2, 900), (3, 3_000)] {
        let stats = ServiceStats { connections: bytes, bytes, reply_bytes: bytes, ..ServiceStats::default() };
        snapshot.service_stats.insert(id, stats);
    }
    snapshot
}

fn selected(args: &SelectorArgs) -> Result<ServiceSelector, ShowError> {
    let selector = ServiceSelector::parse(args, ASK)?;
    selector.check(&counted())?;
    Ok(selector)
}

/// Writes the output of a list command, with the rows of the other tests.
fn write(words: &[&str], out: &mut impl Write) -> Result<(), ShowError> {
    let words = ["ballast"].iter().chain(words);
    match Args::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).command {
        Command::Service { command: ServiceCommand::List(args) } => {
            let selector = selected(&args.selector)?;
            write_list(&args.list.view, out, || Ok(service_list(&counted(), &selector)))
        }
        Command::Backend { command: BackendCommand::List(args) } => {
            let selector = selected(&args.selector)?;
            write_list(&args.list.view, out, || Ok(backend_list(&counted(), &selector, &Places::default())))
        }
        Command::Flow { command: FlowCommand::List(args) } => {
            let services = selected(&args.which.selector)?;
            let selection = FlowSelection::of(&args.which, args.expired, services);
            write_list(&args.list.view, out, || Ok(flow_list(&flows(), &counted(), &selection)))
        }
        Command::Stats(args) => {
            let selector = selected(&args.selector)?;
            write_list(&args.list.view, out, || Ok(stats::list(&counted(), &selector)))
        }
        Command::Map { command: MapCommand::List(args) } => {
            write_list(&args.list.view, out, || map_list(&maps(), &args.names))
        }
        Command::Map { command: MapCommand::Dump(args) } => {
            let entry = |number: u32| (json!({ "port": number }), json!({ "slots": [number], "none": null }));
            write_list(&args.list.view, out, || Ok(dump::list([9, 10, 1].map(entry).to_vec())))
        }
        Command::Config(args) => {
            let origin = |(name, value): (&str, &str)| Origin {
                name: name.to_owned(),
                value: value.to_owned(),
                from: "flag".to_owned(),
            };
            let origins = [("max-flows", "9"), ("max-sockets", "10"), ("bpffs", "")].map(origin);
            write_list(&args.list, out, || config::list(&origins, &args.names, args.defaults))
        }
        other => panic!("no list: {other:?}"),
    }
}

impl Listing {
    fn words<'a>(&self, flags: &[&'a str]) -> Vec<&'a str> {
        self.words.iter().chain(flags).copied().collect()
    }

    fn prints(&self, flags: &[&str]) -> String {
        let mut out = Vec::new();
        let words = self.words(flags);
        write(&words, &mut out).unwrap_or_else(|error| panic!("{words:?}: {error}"));
        String::from_utf8(out).unwrap()
    }

    /// Returns the rows of the JSON output.
    fn rows(&self, flags: &[&str]) -> Vec<Value> {
        let json: Value = serde_json::from_str(&self.prints(&[flags, &["-o", "json"]].concat())).unwrap();
        json[self.group].as_array().unwrap_or_else(|| panic!("no {}: {json}", self.group)).clone()
    }

    /// Returns the words of each line.
    fn lines(&self, flags: &[&str]) -> Vec<Vec<String>> {
        let line = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        self.prints(flags).lines().map(line).collect()
    }
}

/// A writer that ends a watch after a number of looks.
struct Looks {
    text: Vec<u8>,
    left: u32,
}

impl Write for Looks {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.text.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(())
    }
}

#[test]
fn every_command_that_prints_names_is_tested_here() {
    fn collect(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        for one in command.get_subcommands() {
            collect(one, &format!("{path} {}", one.get_name()), found);
        }
        let prints_names = |arg: &clap::Arg| {
            arg.get_long() == Some("output")
                && arg.get_possible_values().iter().any(|value| value.get_name() == "name")
        };
        if command.get_arguments().any(prints_names) {
            found.push(path.trim().to_owned());
        }
    }
    let mut found = Vec::new();
    collect(&<Args as clap::CommandFactory>::command(), "", &mut found);
    let is_tested = |path: &String| LISTS.iter().any(|list| list.words.join(" ").starts_with(path.as_str()));
    found.retain(|path| !is_tested(path));
    // They are no lists of rows that can be sorted and watched, or have tests of their own.
    let others = [
        "status",
        "check",
        "service show",
        "flow delete",
        "explain",
        "monitor",
        "top",
        "programmed",
        "version",
    ];
    assert_eq!(found, others);
}

#[test]
fn every_list_is_a_table_a_document_or_names() {
    for list in LISTS {
        let (text, wide) = (list.lines(&[]), list.lines(&["-o", "wide"]));
        let rows = list.rows(&[]);
        assert!(rows.len() > 1 && text.len() == rows.len() + 1, "{:?}: {text:?}", list.words);
        assert_eq!(wide.len(), text.len());
        assert!(text[0].iter().all(|heading| wide[0].contains(heading)), "{wide:?}");
        for (form, with) in [("text", text), ("wide", wide)] {
            assert_eq!(list.lines(&["-o", form, "--no-headers"]), with[1..], "{:?} {form}", list.words);
        }
        let yaml = list.prints(&["-o", "yaml"]);
        let yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(yaml[list.group].as_array().map(Vec::len), Some(rows.len()));
        let names = list.prints(&["-o", "name"]);
        let unique: BTreeSet<&str> = names.lines().collect();
        assert!(!names.is_empty() && names.lines().all(|name| !name.is_empty()), "{:?}", list.words);
        assert!(unique.len() == names.lines().count() && unique.len() <= rows.len(), "{names}");
    }
}

/// Whether values are sorted: numbers as numbers, false before true; missing values come first.
fn is_sorted(values: &[&Value]) -> bool {
    values.is_sorted_by(|one, other| match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() <= other.as_f64(),
        (Value::Bool(one), Value::Bool(other)) => one <= other,
        (Value::String(_), Value::String(_)) | (Value::Null, _) => true,
        _ => one == other,
    })
}

#[test]
fn every_list_is_sorted_by_every_field_and_column() {
    for list in LISTS {
        let rows = list.rows(&[]);
        let fields: BTreeSet<&String> = rows.iter().flat_map(|row| row.as_object().unwrap().keys()).collect();
        for field in fields {
            let sorted = list.rows(&["--sort-by", field]);
            let values: Vec<_> =
                sorted.iter().map(|row| &row[field]).filter(|one| !one.is_object()).collect();
            assert_eq!(sorted.len(), rows.len());
            assert!(values.iter().any(|one| one.is_array()) || is_sorted(&values), "{field}: {values:?}");
        }
        for heading in &list.lines(&["-o", "wide"])[0] {
            let sorted = list.rows(&["--sort-by", &heading.to_lowercase()]);
            assert_eq!(sorted.len(), rows.len(), "{:?} {heading}", list.words);
        }
        for (column, field) in list.fields {
            let sorted = list.rows(&["--sort-by", &column.to_uppercase()]);
            let values: Vec<_> = sorted.iter().map(|row| &row[field]).collect();
            assert!(is_sorted(&values), "{:?} {column}: {values:?}", list.words);
        }
        let error = write(&list.words(&["--sort-by", "nothing"]), &mut Vec::new()).unwrap_err().to_string();
        let known = error.rsplit_once("--sort-by takes ").unwrap().1.to_lowercase();
        for heading in &list.lines(&["-o", "wide"])[0] {
            assert!(known.contains(&heading.to_lowercase()), "{heading}: {error}");
        }
    }
}

#[test]
fn every_list_is_watched() {
    for list in LISTS {
        let watch = |flags: &[&str]| {
            let mut out = Looks { text: Vec::new(), left: 2 };
            let words = list.words(&[flags, &["--watch", "--interval", "1ms"]].concat());
            let error = write(&words, &mut out).unwrap_err();
            assert!(matches!(error, ShowError::Write(_)), "{words:?}: {error}");
            String::from_utf8(out.text).unwrap()
        };
        // Two looks with the same result print it once.
        assert_eq!(watch(&[]), list.prints(&[]), "{:?}", list.words);
        assert_eq!(watch(&["--no-headers"]), list.prints(&["--no-headers"]));
        let documents: Vec<Value> =
            watch(&["-o", "json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(documents, list.rows(&[]));
        let events = watch(&["-o", "json", "--output-watch-events"]);
        assert!(
            events.lines().all(|line| line.starts_with("{\"object\"") && line.contains("\"ADDED\"")),
            "{events}"
        );
    }
}

#[test]
fn every_list_of_services_is_of_a_namespace_of_names_or_of_labels() {
    for list in LISTS.iter().filter(|list| ["service", "backend", "flow", "stats"].contains(&list.words[0])) {
        let services = |flags: &[&str]| -> BTreeSet<String> {
            let service = |row: &Value| row["service"].as_str().unwrap().to_owned();
            list.rows(flags).iter().map(service).collect()
        };
        let all = services(&[]);
        assert!(all.contains("default/redis:resp"), "{all:?}");
        assert_eq!(services(&["-n", "kube-system", "-A"]), all, "-A goes before -n");
        let of =
            |start: &str| all.iter().filter(|one| one.starts_with(start)).cloned().collect::<BTreeSet<_>>();
        assert_eq!(services(&["-n", "kube-system"]), of("kube-system/"), "{:?}", list.words);
        assert_eq!(services(&["redis"]), of("default/redis"));
        assert_eq!(services(&["default/redis:6379", "svc/redis"]), of("default/redis"));
        assert_eq!(services(&["-l", "app=shop"]), of("web/shop"));
        let error = write(&list.words(&["rdis"]), &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("did you mean default/redis?"), "{error}");
    }
    let named = |words: &[&str]| -> Result<String, ShowError> {
        let mut out = Vec::new();
        write(words, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    };
    assert_eq!(named(&["map", "list", "flows", "-o", "name"]).unwrap(), "flows\n");
    assert!(named(&["map", "list", "flwos"]).unwrap_err().to_string().contains("did you mean flows?"));
    assert_eq!(named(&["config", "max-flows", "-o", "name"]).unwrap(), "max-flows\n");
}
