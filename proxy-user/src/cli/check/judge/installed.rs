//! What is installed: the agent, its programs and maps.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Line, some};
use crate::cli::check::facts::{Installed, Told};
use crate::cli::show::{AgentState, is_nearly_full};
use crate::programs::hooks::{Direction, SOCKET_HOOKS, XDP};

/// The agent syncs at least once in `--sync-period`, 30 s by default. A last sync older than this is reported.
const OLD: Duration = Duration::from_mins(5);

pub(super) fn judge(installed: &Installed) -> Vec<Line> {
    let mut lines =
        vec![agent(installed), problems(installed), sockets(installed), devices(installed), pins(installed)];
    lines.extend(maps(installed));
    if let Some(told) = &installed.told {
        lines.extend([version(told), sync(told), audit(told)]);
    }
    lines
}

fn agent(installed: &Installed) -> Line {
    const CHECK: &str = "agent";
    match &installed.agent {
        AgentState::NotAsked => Line::warn(
            CHECK,
            "its metrics server is switched off, so it was not asked",
            "set metricsBindAddress (--metrics-bind-address)",
        ),
        AgentState::Answered { address, status: 200 } => {
            Line::pass(CHECK, format!("it answers at {address}"))
        }
        AgentState::Answered { address, status } => Line::fail(
            CHECK,
            format!("it answers at {address} with HTTP {status}"),
            format!("see its log, and http://{address}/healthz"),
        ),
        AgentState::Silent { address, reason } => Line::fail(
            CHECK,
            format!(
                "it does not answer at {address} ({reason}): the programs keep serving what is in the maps, and nothing updates them"
            ),
            "start `ballast run`, or name its address with --metrics-bind-address",
        ),
    }
}

fn problems(installed: &Installed) -> Line {
    const CHECK: &str = "problems";
    match installed.problems.as_slice() {
        [] => Line::pass(CHECK, "the agent reports none"),
        problems => {
            Line::warn(CHECK, problems.join("; "), "`ballast status` lists them; each says what to do")
        }
    }
}

fn sockets(installed: &Installed) -> Line {
    const CHECK: &str = "socket-programs";
    let is_there = |name: &str| installed.attachments.iter().any(|one| one.hook == name && one.is_attached());
    let missing: Vec<_> = SOCKET_HOOKS.iter().map(|(name, _)| *name).filter(|name| !is_there(name)).collect();
    if missing.is_empty() {
        return Line::pass(CHECK, format!("all {} are attached to the cgroup", SOCKET_HOOKS.len()));
    }
    Line::fail(
        CHECK,
        format!("{} of {} are not attached: {}", missing.len(), SOCKET_HOOKS.len(), some(&missing)),
        "start `ballast run`; an agent that runs attaches them again, and logs what it cannot",
    )
}

fn devices(installed: &Installed) -> Line {
    const CHECK: &str = "device-programs";
    // By device: which directions work. XDP is an addition.
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
        return Line::fail(
            CHECK,
            "no device has programs: packets are not translated",
            "start `ballast run`; --devices may leave all out",
        );
    }
    if incomplete.is_empty() {
        return Line::pass(CHECK, format!("both directions of {}", some(seen.keys().map(name))));
    }
    Line::fail(
        CHECK,
        format!("detached externally: {}", some(incomplete)),
        "start `ballast run`; an agent that runs attaches them again. If it happens again, look for the tool that detaches them",
    )
}

fn pins(installed: &Installed) -> Line {
    const CHECK: &str = "pins";
    match &installed.owner {
        Ok(()) => Line::pass(CHECK, "the folders of the maps are root's alone"),
        Err(why) => Line::fail(
            CHECK,
            why.clone(),
            "remove what is not Ballast's, or `chown root` and `chmod go-w` the folders",
        ),
    }
}

fn maps(installed: &Installed) -> Vec<Line> {
    const MAPS: &str = "maps";
    const USAGE: &str = "map-usage";
    let (rows, abi) = match &installed.maps {
        Ok(maps) => maps,
        Err(why) => {
            return vec![Line::fail(MAPS, why.clone(), "start `ballast run`, which makes what is missing")];
        }
    };
    if *abi == 0 {
        return vec![Line::fail(
            MAPS,
            "they were never filled: the agent did not come as far as its first sync",
            "see the agent's log: the API server does not answer, or refuses",
        )];
    }
    let full = rows.iter().filter(|row| is_nearly_full(row));
    let full: Vec<_> = full
        .map(|row| {
            (format!("{} ({} of {})", row.name, row.used.unwrap_or_default(), row.capacity), row.setting)
        })
        .collect();
    let usage = if full.is_empty() {
        Line::pass(USAGE, "none is nearly full")
    } else {
        let (names, mut settings): (Vec<_>, Vec<_>) = full.into_iter().unzip();
        settings.sort_unstable();
        settings.dedup();
        Line::warn(USAGE, format!("nearly full: {}", some(names)), format!("raise {}", settings.join(", ")))
    };
    vec![Line::pass(MAPS, format!("all {} are pinned", rows.len())), usage]
}

fn version(told: &Told) -> Line {
    const CHECK: &str = "agent-version";
    let ours = env!("CARGO_PKG_VERSION");
    match told.version.as_deref() {
        Some(version) if version == ours => Line::pass(CHECK, version),
        Some(version) => Line::warn(
            CHECK,
            format!("the agent is {version}, and this program {ours}"),
            "use the agent's own program: `kubectl -n kube-system exec POD -- ballast check`",
        ),
        None => Line::warn(CHECK, "it does not tell its version", "is it Ballast's agent that answers?"),
    }
}

fn sync(told: &Told) -> Line {
    const CHECK: &str = "sync";
    let advice = "see the agent's log; `ballast status` names what could not be programmed";
    let Some(age) = told.sync_age else {
        return Line::fail(
            CHECK,
            "there was none yet",
            "see the agent's log: the API server does not answer, or refuses",
        );
    };
    let seconds = age.as_secs();
    if !told.synced {
        return Line::warn(CHECK, "not everything that was listed has been in the maps", advice);
    }
    if age > OLD {
        let seen = format!("the last one was {seconds} s ago; {} changes wait", told.pending);
        return if told.pending > 0 {
            Line::fail(CHECK, seen, advice)
        } else {
            Line::warn(CHECK, seen, advice)
        };
    }
    Line::pass(CHECK, format!("{seconds} s ago; {} changes wait", told.pending))
}

fn audit(told: &Told) -> Line {
    const CHECK: &str = "audit";
    let Told { audits_clean: clean, audits_repaired: repaired, audits_failed: failed, .. } = told;
    let seen = format!(
        "{clean} found no difference to the API server, {repaired} repaired one, {failed} could not be made"
    );
    if *repaired > 0 {
        let advice =
            "report it, with the agent's log: a watch lost something, or another tool writes to the maps";
        return Line::warn(CHECK, seen, advice);
    }
    if *failed > 0 && *clean == 0 {
        return Line::warn(CHECK, seen, "see the agent's log: the API server does not answer");
    }
    if clean + failed == 0 {
        return Line::pass(CHECK, "none yet (--api-audit-period)");
    }
    Line::pass(CHECK, seen)
}
