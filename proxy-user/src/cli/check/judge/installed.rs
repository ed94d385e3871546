//! Checks the agent, its programs and its maps.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{CheckLine, some};
use crate::cli::check::facts::{AgentMetrics, Installed};
use crate::cli::show::{AgentState, is_nearly_full};
use crate::programs::Attachment;
use crate::programs::hooks::{Direction, SOCKET_HOOKS, XDP};
use proxy_core::model::plural::plural;

/// The agent compares the maps once in `--sync-period`, 30 s by default. A last time that is older than this, and than several of
/// these periods, is reported.
const OLD: Duration = Duration::from_mins(5);
const PERIODS: u32 = 3;

pub(super) const PROBLEMS: &str = "problems";
pub(super) const MAPS: &str = "maps";
const SOCKETS: &str = "socket-programs";
const DEVICES: &str = "device-programs";
const PINS: &str = "pins";

pub(super) fn judge(installed: &Installed) -> Vec<CheckLine> {
    let mut lines = vec![agent(installed), problems(installed)];
    if installed.is_denied {
        lines.extend([SOCKETS, DEVICES, PINS].map(|check| {
            CheckLine::warn(check, "cannot tell: this process may not read the pins", "run as root")
        }));
    } else {
        lines.extend([sockets(installed), devices(installed), pins(installed)]);
    }
    lines.extend(maps(installed));
    if let Some(metrics) = &installed.metrics {
        lines.extend([version(metrics), sync(metrics), audit(metrics)]);
    }
    lines
}

fn agent(installed: &Installed) -> CheckLine {
    const CHECK: &str = "agent";
    match &installed.agent {
        AgentState::NotAsked => CheckLine::pass(CHECK, "not checked: its metrics server is switched off"),
        AgentState::Answered { address, status: 200 } => {
            CheckLine::pass(CHECK, format!("the agent answers at {address}"))
        }
        AgentState::Answered { address, status } => CheckLine::fail(
            CHECK,
            format!("the agent answers at {address} with HTTP {status}"),
            format!("see the agent's log and http://{address}/healthz"),
        ),
        AgentState::Silent { address, reason }
            if installed.attachments.iter().any(Attachment::is_attached) =>
        {
            CheckLine::fail(
                CHECK,
                format!(
                    "the agent does not answer at {address} ({reason}): the programs work with the current maps; if the agent is \
                     stopped, nothing updates them"
                ),
                "check that the agent runs (`ballast run`), or give its address with --metrics-bind-address",
            )
        }
        AgentState::Silent { address, reason } => CheckLine::fail(
            CHECK,
            format!(
                "no agent answers at {address} ({reason}), and no program is attached: Ballast does not serve this node"
            ),
            "start `ballast run`, or give the agent's address with --metrics-bind-address",
        ),
    }
}

fn problems(installed: &Installed) -> CheckLine {
    match (installed.report.problems.as_slice(), &installed.agent) {
        ([], AgentState::Answered { .. }) => CheckLine::pass(PROBLEMS, "the agent reports no problem"),
        ([], AgentState::NotAsked) => {
            CheckLine::pass(PROBLEMS, "not checked: its metrics server is switched off")
        }
        ([], AgentState::Silent { .. }) => {
            CheckLine::warn(PROBLEMS, "not known: the agent does not answer", "see the line `agent`")
        }
        (problems, _) => {
            let advice = "run `ballast status`, and fix the problems that it lists";
            CheckLine::warn(PROBLEMS, problems.join("; "), advice)
        }
    }
}

fn sockets(installed: &Installed) -> CheckLine {
    const CHECK: &str = SOCKETS;
    let is_there = |name: &str| installed.attachments.iter().any(|one| one.hook == name && one.is_attached());
    let missing: Vec<_> = SOCKET_HOOKS.iter().map(|(name, _)| *name).filter(|name| !is_there(name)).collect();
    if missing.is_empty() {
        return CheckLine::pass(
            CHECK,
            format!("all {} socket programs are attached to the cgroup", SOCKET_HOOKS.len()),
        );
    }
    CheckLine::fail(
        CHECK,
        format!(
            "{} of {} socket programs are not attached: {}",
            missing.len(),
            SOCKET_HOOKS.len(),
            some(&missing)
        ),
        if installed.attachments.iter().any(|one| one.ifindex.is_none() && one.place.is_none()) {
            "restart `ballast run`: the cgroup to which they were attached was removed"
        } else {
            "start `ballast run`. A running agent attaches them again; if it cannot, see its log"
        },
    )
}

fn devices(installed: &Installed) -> CheckLine {
    const CHECK: &str = DEVICES;
    // Working directions of each device. XDP is optional and does not count.
    let mut seen: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for one in installed.attachments.iter().filter(|one| one.program != XDP) {
        let Some(ifindex) = one.ifindex.filter(|ifindex| installed.devices.contains_key(ifindex)) else {
            continue;
        };
        let working = seen.entry(ifindex).or_default();
        if one.is_attached() {
            working.push(one.program);
        }
    }
    let name = |ifindex: &u32| installed.devices.get(ifindex).cloned().unwrap_or_default();
    let lacks = |(ifindex, working): (&u32, &Vec<&str>)| {
        let missing = Direction::ALL.iter().filter(|direction| !working.contains(&direction.program()));
        let missing: Vec<_> = missing.map(ToString::to_string).collect();
        (!missing.is_empty()).then(|| format!("{} ({})", name(ifindex), missing.join(", ")))
    };
    let incomplete: Vec<_> = seen.iter().filter_map(lacks).collect();
    if seen.is_empty() {
        return CheckLine::fail(
            CHECK,
            "no device has Ballast's programs: packets are not translated",
            "start `ballast run`; check whether --devices excludes all devices",
        );
    }
    let named: Vec<_> = seen.keys().map(name).collect();
    let detached = installed.metrics.iter().flat_map(|metrics| &metrics.detached);
    let bare: Vec<_> = detached.filter(|device| !named.contains(device)).collect();
    if incomplete.is_empty() && bare.is_empty() {
        return CheckLine::pass(CHECK, format!("attached to both directions of {}", some(named)));
    }
    if incomplete.is_empty() {
        return CheckLine::fail(
            CHECK,
            format!("the agent cannot attach them to the uplink {}", some(bare)),
            "see the line `problems` for the reason",
        );
    }
    CheckLine::fail(
        CHECK,
        format!("detached externally: {}", some(incomplete)),
        "start `ballast run`. A running agent attaches them again; if this repeats, find the tool that detaches them",
    )
}

fn pins(installed: &Installed) -> CheckLine {
    const CHECK: &str = PINS;
    match &installed.owner {
        None => {
            CheckLine::fail(CHECK, "not there: Ballast is not installed on this node", "start `ballast run`")
        }
        Some(Ok(())) => CheckLine::pass(CHECK, "only root can write to the folders of the maps"),
        Some(Err(why)) => CheckLine::fail(
            CHECK,
            why.clone(),
            "remove files that are not Ballast's, or `chown root` and `chmod go-w` the folders",
        ),
    }
}

fn maps(installed: &Installed) -> Vec<CheckLine> {
    const USAGE: &str = "map-usage";
    let (rows, abi) = match &installed.maps {
        Ok(maps) => maps,
        Err(why) => {
            return vec![CheckLine::fail(
                MAPS,
                why.clone(),
                "do what the message says; `ballast run` creates maps that are missing",
            )];
        }
    };
    if *abi == 0 {
        return vec![CheckLine::fail(
            MAPS,
            "the maps are empty: the agent has not completed its first sync",
            "see the agent's log; probably the API server does not answer or denies access",
        )];
    }
    let full = rows.iter().filter(|row| is_nearly_full(row));
    let full: Vec<_> = full
        .map(|row| {
            (format!("{} ({} of {})", row.name, row.used.unwrap_or_default(), row.capacity), row.setting)
        })
        .collect();
    let usage = if full.is_empty() {
        CheckLine::pass(USAGE, "no map is nearly full")
    } else {
        let (names, mut settings): (Vec<_>, Vec<_>) = full.into_iter().unzip();
        settings.sort_unstable();
        settings.dedup();
        CheckLine::warn(
            USAGE,
            format!("nearly full: {}", some(names)),
            format!("raise {}", settings.join(", ")),
        )
    };
    vec![CheckLine::pass(MAPS, format!("all {} maps are pinned", rows.len())), usage]
}

fn version(metrics: &AgentMetrics) -> CheckLine {
    const CHECK: &str = "agent-version";
    let ours = env!("CARGO_PKG_VERSION");
    match metrics.version.as_deref() {
        Some(version) if version == ours => CheckLine::pass(CHECK, version),
        Some(version) => CheckLine::warn(
            CHECK,
            format!("the agent has version {version}, and this program {ours}"),
            "use the program in the agent's container: `kubectl -n kube-system exec POD -- ballast check`",
        ),
        None => CheckLine::warn(
            CHECK,
            "the program at this address is not Ballast's agent (kube-proxy?)",
            "stop kube-proxy: the agent takes over the port within 5 s",
        ),
    }
}

fn sync(metrics: &AgentMetrics) -> CheckLine {
    const CHECK: &str = "sync";
    let advice = "see the agent's log, and `ballast status` for objects that are not programmed";
    let Some(age) = metrics.sync_age else {
        return CheckLine::fail(
            CHECK,
            "the agent has not completed a sync yet",
            "see the agent's log; probably the API server does not answer or denies access",
        );
    };
    let seconds = age.as_secs();
    if !metrics.synced {
        return CheckLine::warn(CHECK, "some listed objects are not programmed yet", advice);
    }
    let seen =
        format!("the maps were up to date {seconds} s ago; {} pending", plural(metrics.pending, "change"));
    if age > OLD.max(metrics.sync_period.saturating_mul(PERIODS)) {
        return CheckLine::fail(CHECK, seen, advice);
    }
    CheckLine::pass(CHECK, seen)
}

fn audit(metrics: &AgentMetrics) -> CheckLine {
    const CHECK: &str = "audit";
    let AgentMetrics { audits_clean: clean, audits_repaired: repaired, audits_failed: failed, .. } = metrics;
    let seen = format!(
        "{} without a difference to the API server, {repaired} repaired a difference, {failed} failed",
        plural(clean, "audit")
    );
    if *repaired > 0 {
        let advice =
            "report this with the agent's log: a watch lost an event, or another tool writes to the maps";
        return CheckLine::warn(CHECK, seen, advice);
    }
    if *failed > 0 && *clean == 0 {
        return CheckLine::warn(CHECK, seen, "see the agent's log; probably the API server does not answer");
    }
    if clean + failed == 0 {
        return CheckLine::pass(CHECK, "no audit yet (--api-audit-period)");
    }
    CheckLine::pass(CHECK, seen)
}
