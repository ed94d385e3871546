//! `ballast`: parses the command line, runs the command, and reports errors.

use std::io::{ErrorKind, Write, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory as _, FromArgMatches as _, Parser as _};
use proxy_cli::args::bpffs::BpffsArgs;
use proxy_cli::args::change::{CleanupArgs, SysdumpArgs};
use proxy_cli::args::observe::MonitorArgs;
use proxy_cli::program;
use proxy_user::cli::args::gate::GateArgs;
use proxy_user::cli::args::log::EndUdpSocketsArgs;
use proxy_user::cli::args::without_empty_variables;
use proxy_user::cli::export_conntrack::ConntrackExport;
use proxy_user::cli::monitor::{self, MonitorError};
use proxy_user::cli::origins::{self, Origin};
use proxy_user::cli::show::{AskApi, CommandOutput, ShowError};
use proxy_user::cli::{
    Args, Command, check, colour, complete, confirm, explain, programmed, show, sysdump, takeover, version,
};
use proxy_user::config::kube_proxy::flags::as_spelled_here;
use proxy_user::config::otlp::Telemetry;
use proxy_user::config::{Options, RunConfig};
use proxy_user::otlp::{Exporter, Layer};
use proxy_user::{app, gate, host, programs, telemetry, top};

fn main() -> ExitCode {
    program::set_up_resolver();
    app::supervisor::end_on_panic();
    match program::own_name().as_deref() {
        Some("kubectl-ballast" | "kubectl_ballast") => return program::run(),
        Some(program::COMPLETES) => return program::complete(),
        _ => {}
    }
    match ballast() {
        Ok(code) => code,
        Err(error) => {
            // The whole chain on one line, for people and for log collectors; many errors contain the text of their cause.
            let _ = writeln!(std::io::stderr(), "ballast: {}", app::error_text(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs the command line of `ballast`.
fn ballast() -> anyhow::Result<ExitCode> {
    complete::answer();
    run(parse())
}

/// Returns the command, and the origins of the agent's settings if the command is `run`.
fn parse() -> (Command, Vec<Origin>) {
    let mut command = without_empty_variables(Args::command(), |name| std::env::var_os(name));
    let args: Vec<_> = std::env::args_os().collect();
    let is_run = args.iter().any(|arg| arg == "run");
    let args = if is_run { as_spelled_here(args.into_iter()) } else { args };
    let matches = command.try_get_matches_from_mut(args).unwrap_or_else(|error| error.exit());
    let origins = match (command.find_subcommand("run"), matches.subcommand_matches("run")) {
        (Some(run), Some(matches)) => origins::of(run, matches),
        _ => Vec::new(),
    };
    match Args::from_arg_matches(&matches) {
        Ok(args) => (args.command, origins),
        Err(error) => error.format(&mut command).exit(),
    }
}

fn run((command, origins): (Command, Vec<Origin>)) -> anyhow::Result<ExitCode> {
    let ask = app::ASK;
    let out = &mut stdout();
    let text = match command {
        Command::Run(args) => return start(*args, origins),
        Command::Cleanup(args) => return cleanup(&args),
        Command::EndUdpSockets(args) => return end_udp_sockets(&args),
        Command::Gate(args) => return gate(&args),
        Command::Monitor(args) => return monitor(&args, ask),
        Command::Status(args) => {
            let CommandOutput { text, well } = show::status(&args)?;
            print(&text)?;
            return Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Check(args) => {
            let api = app::api_access(&args);
            let CommandOutput { text, well } = check::run(&args, api, colour::of_stdout())?;
            print(&text)?;
            return Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Programmed(args) => return written(programmed::run(&args, ask.labels, out)),
        Command::Top(args) => top::run(&args, ask.labels)?,
        Command::Takeover(args) => takeover::run(&args)?,
        Command::Explain(args) => explain::answer(&args, ask.pod)?,
        Command::Version(args) => version::run(&args)?,
        Command::Service { command } => return written(show::services(&command, ask, out)),
        Command::Backend { command } => return written(show::backends(&command, ask, out)),
        Command::Flow { command } => return written(show::flows(&command, ask, out)),
        Command::Map { command } => return written(show::maps(&command, out)),
        Command::Stats(args) => return written(show::stats(&args, ask, out)),
        Command::Config(args) => return written(show::config(&args, out)),
        Command::Sysdump(args) => {
            let said = sysdump::run(&args, || checked(&args))?;
            // Standard output may be the archive.
            write!(std::io::stderr(), "{said}").context("cannot write to standard error")?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Completion { shell } => {
            complete::script(shell).context("no completion script for this shell")?
        }
        Command::Man { folder } => {
            complete::manuals(&folder).with_context(|| format!("cannot write to {}", folder.display()))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the agent, or what a flag requests instead. The order of these flags is kube-proxy's.
fn start(options: Options, origins: Vec<Origin>) -> anyhow::Result<ExitCode> {
    let (write_to, cleans_up) = (options.write_config_to.clone(), options.cleanup == Some(true));
    let inits = options.init_only == Some(true);
    let removal = CleanupArgs {
        maps: BpffsArgs { bpffs: options.bpffs.clone() },
        cgroup_root: options.cgroup_root.clone(),
        dry_run: false,
        // The flag is explicit enough on the agent's command line; kube-proxy does not ask for confirmation either.
        yes: true,
        stay: false,
    };
    let config = RunConfig::new(options.clone())?;
    let runs = write_to.is_none() && !cleans_up && !inits;
    let exporter = config.otlp.as_ref().filter(|_| runs).map(|_| Exporter::default());
    let layer = config.otlp.as_ref().zip(exporter.as_ref()).map(|(settings, exporter)| Layer {
        spans: settings.has(Telemetry::Traces).then(|| exporter.spans.clone()),
        logs: settings.has(Telemetry::Logs).then(|| exporter.logs.clone()),
    });
    telemetry::init(config.log_format, config.log_level, layer)?;
    if let Some(path) = write_to {
        app::write_config(&config, &path)?;
    } else if cleans_up {
        return cleanup(&removal);
    } else if inits {
        app::init(&config)?;
    } else {
        app::run(options, config, origins, exporter)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn end_udp_sockets(args: &EndUdpSocketsArgs) -> anyhow::Result<ExitCode> {
    telemetry::init(args.log.log_format, args.log.log_level, None)?;
    app::end_udp_sockets(&args.maps.bpffs)?;
    Ok(ExitCode::SUCCESS)
}

fn gate(args: &GateArgs) -> anyhow::Result<ExitCode> {
    telemetry::init(args.log.log_format, args.log.log_level, None)?;
    gate::run(args)?;
    Ok(ExitCode::SUCCESS)
}

fn monitor(args: &MonitorArgs, ask: AskApi) -> anyhow::Result<ExitCode> {
    match monitor::run(args, ask.labels, &mut stdout().lock()) {
        // It is not a failure if the reader closes the pipe early (`| head`).
        Err(MonitorError::Write(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        result => Ok(result.map(|()| ExitCode::SUCCESS)?),
    }
}

fn cleanup(args: &CleanupArgs) -> anyhow::Result<ExitCode> {
    let cgroup = match &args.cgroup_root {
        Some(named) => Some(host::cgroup::find(Some(named))?),
        // Without a cgroup tree, no program of Ballast can be attached to it.
        None => host::cgroup::find(None).ok(),
    };
    let cgroup = cgroup.as_ref().map(|root| root.path.as_path());
    if !args.dry_run && !args.yes && confirm::is_asked() && !wants_cleanup(args, cgroup)? {
        print("nothing was removed\n")?;
        return Ok(ExitCode::FAILURE);
    }
    let mut export = ConntrackExport::new(args.maps.bpffs.clone());
    let (cleanup, verb) = if args.dry_run {
        (programs::dry_run(&args.maps.bpffs, cgroup)?, "would remove")
    } else {
        (programs::cleanup_before(&mut export, &args.maps.bpffs, cgroup)?, "removed")
    };
    let mut text: String = cleanup.removed.iter().map(|line| [verb, " ", line, "\n"].concat()).collect();
    text.push_str(&export.report());
    if cleanup.removed.is_empty() && cleanup.left.is_empty() {
        let bpffs = &args.maps.bpffs;
        let why = if programs::is_bpffs(bpffs) {
            String::new()
        } else {
            format!(": {} is not a bpffs", bpffs.display())
        };
        text.push_str(&["nothing to remove", &why, "\n"].concat());
    }
    print(&text)?;
    for line in &cleanup.left {
        writeln!(std::io::stderr(), "not removed: {line}").context("cannot write to standard error")?;
    }
    if !cleanup.left.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    if args.stay {
        stay()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what would be removed, and asks for confirmation.
fn wants_cleanup(args: &CleanupArgs, cgroup: Option<&Path>) -> anyhow::Result<bool> {
    let found = programs::dry_run(&args.maps.bpffs, cgroup)?;
    if found.removed.is_empty() {
        return Ok(true);
    }
    for line in &found.removed {
        print(&format!("would remove {line}\n"))?;
    }
    let question =
        "This breaks connections to Services, and new ones fail until a proxy runs. Remove all of this?";
    confirm::confirmed(question, &mut std::io::stdin().lock(), &mut std::io::stderr())
        .context("cannot ask for confirmation; use --yes")
}

/// Returns the output of `ballast check -o json`, for the archive.
fn checked(args: &SysdumpArgs) -> Result<String, String> {
    let words = ["ballast", "check", "-o", "json"].map(std::ffi::OsString::from);
    let words = words.into_iter().chain(["--bpffs".into(), args.maps.bpffs.clone().into_os_string()]);
    let parsed = Args::try_parse_from(words).map_err(|error| error.to_string())?;
    let Command::Check(mut check) = parsed.command else {
        return Err("there is no command check".to_owned());
    };
    check.agent = args.agent;
    let answer = check::run(&check, app::api_access(&check), false);
    answer.map(|answer| answer.text).map_err(|error| error.to_string())
}

/// Returns success also if the reader of a list closes the pipe early (`| head`).
fn written(result: Result<(), ShowError>) -> anyhow::Result<ExitCode> {
    match result {
        Err(ShowError::Write(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        result => Ok(result.map(|()| ExitCode::SUCCESS)?),
    }
}

/// Writes an answer; it is not a failure if the reader closes the pipe early (`| head`).
fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// Waits until this process gets SIGTERM or SIGINT.
fn stay() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the async runtime")?.block_on(async {
        app::Ends::listen()?.asked().await;
        Ok(())
    })
}
