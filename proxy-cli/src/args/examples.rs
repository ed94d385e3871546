//! Examples for the help of each command, and what all commands have in common.

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command};

/// The examples of a command: what each does, and its words.
type Examples = &'static [(&'static str, &'static str)];

/// The commands with their examples; those of the plugin begin with `kubectl ballast`.
pub const EXAMPLES: &[(&str, Examples)] = &[
    (
        "run",
        &[
            (
                "Serve the Services of a folder, without a cluster",
                "ballast run --manifests /etc/ballast/manifests",
            ),
            ("Serve the Services of a cluster", "ballast run --kubeconfig /etc/ballast/kubeconfig"),
        ],
    ),
    (
        "status",
        &[
            ("Show all attached programs", "ballast status -o wide"),
            ("For scripts", "ballast status -o json"),
        ],
    ),
    (
        "check",
        &[
            ("Before the installation", "ballast check --pre"),
            ("Only what does not pass", "ballast check -o short"),
            ("Two checks of a node without a cluster", "ballast check --no-api maps sync"),
        ],
    ),
    ("service", &[("All Services", "ballast service list"), ("One Service", "ballast svc show web")]),
    (
        "service list",
        &[
            ("All Services, with algorithms and all endpoints", "ballast service list -o wide"),
            ("One port of a Service", "ballast service list shop/web:http"),
            ("Services of a namespace, by address", "ballast service list -n shop --sort-by address"),
        ],
    ),
    (
        "service show",
        &[
            ("A Service of the namespace default", "ballast service show web"),
            ("With pods, nodes and zones of the endpoints", "ballast service show svc/web -n shop -o wide"),
        ],
    ),
    (
        "service zero",
        &[("One Service", "ballast service zero shop/web"), ("All Services", "ballast service zero --all")],
    ),
    ("backend", &[("All endpoints", "ballast backend list")]),
    (
        "backend list",
        &[
            ("Endpoints of a Service", "ballast backend list svc/web"),
            ("With pods, nodes and zones", "ballast endpoint list -n shop -o wide"),
            ("The endpoints with the most connections last", "ballast backend list --sort-by connections"),
        ],
    ),
    ("flow", &[("All connections", "ballast flow list")]),
    (
        "flow list",
        &[
            ("Connections of a client to a Service", "ballast flow list web --client 10.0.0.7"),
            ("Half-open connections", "ballast flow list --state half-open"),
        ],
    ),
    (
        "flow delete",
        &[
            ("Show what would be deleted", "ballast flow delete --backend 10.244.1.7:8080 --dry-run"),
            ("The UDP connections of a Service", "ballast flow delete kube-system/kube-dns --protocol udp"),
        ],
    ),
    (
        "stats",
        &[
            ("Counters of all Services", "ballast stats"),
            ("Rates of a Service over 5 seconds, again and again", "ballast stats web --rate=5 --watch"),
        ],
    ),
    ("map", &[("All maps", "ballast map list")]),
    (
        "map list",
        &[
            ("All maps", "ballast map list"),
            ("With ids and flags for their sizes", "ballast map list -o wide"),
        ],
    ),
    (
        "map dump",
        &[
            ("The entries of a map", "ballast map dump services"),
            ("As JSON", "ballast map dump flows -o json"),
        ],
    ),
    (
        "explain",
        &[
            ("A pod of this node connects to a Service", "ballast explain pod svc/web:http"),
            ("A process on this node connects to an address", "ballast explain host 10.96.0.10:53/udp"),
            (
                "A client outside connects to a node port",
                "ballast explain 198.51.100.9 192.0.2.1:30080 -o wide",
            ),
        ],
    ),
    (
        "monitor",
        &[
            ("Refusals and drops of a Service", "ballast monitor svc/web --kind reject,drop"),
            ("New connections of a range of clients", "ballast monitor --kind new --client 10.0.0.0/24"),
            ("What was dropped lately", "ballast monitor --last 20 --kind drop"),
        ],
    ),
    (
        "top",
        &[
            ("Live, the Services of a namespace", "ballast top -n shop"),
            ("Once, for a script", "ballast top --screen drops -o json --interval 5"),
        ],
    ),
    (
        "programmed",
        &[("All Services", "ballast programmed"), ("One Service", "ballast programmed shop/web -o json")],
    ),
    (
        "config",
        &[
            ("The settings that were given", "ballast config"),
            ("One setting, and its source", "ballast config max-flows"),
        ],
    ),
    ("sysdump", &[("Into a file", "ballast sysdump"), ("To standard output", "ballast sysdump -")]),
    ("completion", &[("For this shell: source <(ballast completion bash)", "ballast completion bash")]),
    ("version", &[("Of this program and of the agent", "ballast version")]),
    (
        "takeover",
        &[
            ("Show what would be removed", "ballast takeover --dry-run"),
            ("Wait for old connections at most 10 minutes", "ballast takeover --wait 10m"),
        ],
    ),
    (
        "gate",
        &[
            (
                "As a sidecar, with what the variables of docs/operations.md say about the pod",
                "ballast gate --service web --host 172.30.0.1 --namespace default --pod web-0 --addresses 10.244.0.7",
            ),
            (
                "As an init container",
                "ballast gate --once --service web --host 172.30.0.1 --namespace default --pod web-0 --addresses 10.244.0.7",
            ),
        ],
    ),
    ("end-udp-sockets", &[("Beside the agent", "ballast end-udp-sockets")]),
    (
        "cleanup",
        &[
            ("Show what would be removed", "ballast cleanup --dry-run"),
            ("Do not ask", "ballast cleanup --yes"),
        ],
    ),
    (
        "kubectl ballast status",
        &[
            ("All nodes", "kubectl ballast status"),
            ("Two nodes, for a script", "kubectl ballast status --node a,b -o json"),
            ("Again and again, with the memory of the agents", "kubectl ballast status -w -o wide"),
        ],
    ),
    ("kubectl ballast service", &[("All Services", "kubectl ballast service list")]),
    (
        "kubectl ballast service list",
        &[
            ("All Services, and which nodes differ", "kubectl ballast service list"),
            ("Services of a namespace, with all endpoints", "kubectl ballast svc ls -n shop -o wide"),
        ],
    ),
    (
        "kubectl ballast service show",
        &[("A Service as each node has it", "kubectl ballast service show web -n shop -o wide")],
    ),
    ("kubectl ballast check", &[("What does not pass, with the nodes", "kubectl ballast check")]),
    ("kubectl ballast backend", &[("All endpoints", "kubectl ballast backend list")]),
    (
        "kubectl ballast backend list",
        &[("Endpoints of a Service on each node", "kubectl ballast backend list svc/web -n shop")],
    ),
    ("kubectl ballast flow", &[("All connections", "kubectl ballast flow list")]),
    (
        "kubectl ballast flow list",
        &[
            ("Connections of a client to a Service", "kubectl ballast flow list web --client 10.0.0.7"),
            ("Half-open connections on one node", "kubectl ballast flow list --node a --state half-open"),
        ],
    ),
    (
        "kubectl ballast stats",
        &[
            ("Counters of a namespace on each node", "kubectl ballast stats -n shop"),
            ("Rates of a Service over 5 seconds", "kubectl ballast stats web --rate=5s"),
        ],
    ),
    ("kubectl ballast map", &[("The maps of a node", "kubectl ballast map list --node a")]),
    ("kubectl ballast map list", &[("The fullest last", "kubectl ballast map list --sort-by used")]),
    ("kubectl ballast map dump", &[("The entries of a map", "kubectl ballast map dump services --node a")]),
    (
        "kubectl ballast top",
        &[(
            "Refusals and drops of each node, over 5 seconds",
            "kubectl ballast top --screen drops --interval 5s",
        )],
    ),
    (
        "kubectl ballast programmed",
        &[("The version of a Service on each node", "kubectl ballast programmed web -n shop")],
    ),
    ("kubectl ballast version", &[("Of this program and of all nodes", "kubectl ballast version")]),
    (
        "kubectl ballast explain",
        &[("A pod connects to a Service", "kubectl ballast explain pod/shop/client svc/shop/web:http")],
    ),
    (
        "kubectl ballast monitor",
        &[("Refusals and drops of a Service", "kubectl ballast monitor svc/web --kind reject,drop")],
    ),
    ("kubectl ballast ui", &[("On any free port", "kubectl ballast ui --port 0")]),
    ("kubectl ballast sysdump", &[("Into a file", "kubectl ballast sysdump all.tar")]),
    (
        "kubectl ballast wait",
        &[(
            "At most a minute, until all nodes have a change",
            "kubectl ballast wait service/web --programmed --timeout 1m",
        )],
    ),
];

/// The words with which a command of the plugin begins.
const PLUGIN: &str = "kubectl ballast";

/// Adds examples to the help of a command and of its subcommands. Words of fixed sets count in any case, and a switch also has a
/// value (`--flag=false`).
pub fn prepare(command: Command) -> Command {
    prepare_below("", command)
}

/// Does the same for the plugin of kubectl.
pub fn prepare_plugin(command: Command) -> Command {
    prepare_below(PLUGIN, command)
}

/// Lets a switch have a value, as flags of Go have.
fn with_value(arg: Arg) -> Arg {
    let arg = if arg.is_required_set() { arg } else { arg.default_value("false").hide_default_value(true) };
    let arg = arg.action(ArgAction::Set).num_args(0..=1).require_equals(true);
    let arg = arg.default_missing_value("true").value_name("BOOL").hide_possible_values(true);
    // A variable of the environment switches on with any other value.
    if arg.get_env().is_none() { arg.value_parser(BoolishValueParser::new()) } else { arg }
}

fn prepare_below(parent: &str, command: Command) -> Command {
    let path = format!("{parent} {}", command.get_name());
    let path = path.trim();
    let examples = EXAMPLES.iter().find(|(of, _)| *of == path).map(|(_, examples)| *examples);
    let text = examples.map(|examples| {
        let one = |(what, words): &(&str, &str)| format!("  # {what}\n  {words}\n");
        format!("Examples:\n{}", examples.iter().map(one).collect::<String>())
    });
    let command = match text {
        Some(text) => command.after_help(text),
        None => command,
    };
    let is_plugin = path.starts_with(PLUGIN);
    let command = command.mut_args(|arg| {
        let has_words = arg.get_action().takes_values() && !arg.get_possible_values().is_empty();
        let arg = if has_words { arg.ignore_case(true) } else { arg };
        let arg = if matches!(arg.get_action(), ArgAction::SetTrue) { with_value(arg) } else { arg };
        // The variables are settings of a node.
        if is_plugin { arg.env(None::<&str>) } else { arg }
    });
    command.mut_subcommands(|below| prepare_below(path, below))
}
