//! An audit repairs maps that differ from the API server's objects; in all other cases, audits find no difference.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use proxy_core::store::{Store as _, Write};
use proxy_user::maps::KernelStore;
use serde_json::json;

use super::{Case, service, slice};
use crate::agent::Node;
use crate::oracle::agree;
use proxy_testbed::kube::control::ControlPlane;

/// Name of the case that changes the maps itself, without the agent, so that an audit finds a difference.
pub const REPAIRS: &str = "an_audit_repairs_what_differs";

/// The agent's log message about a difference.
const DIFFERED: &str = "what was programmed differed from the API server for more than a minute";

/// Checks that no audit of this case has found a difference, and that the agents could read the API server's protobuf.
pub fn found_nothing(case: &Case, node: &Node) -> Result<()> {
    let log = fs::read_to_string(node.log_file()).unwrap_or_default();
    let line = log.lines().find(|line| line.contains(DIFFERED));
    ensure!(case.name == REPAIRS || line.is_none(), "{line:?}");
    let line = log.lines().find(|line| line.contains("requesting JSON"));
    ensure!(line.is_none(), "{line:?}");
    Ok(())
}

pub fn repairs(control: &mut ControlPlane, node: &Node) -> Result<()> {
    let api = &control.api;
    api.create(&service("web", &json!({}))?)?;
    api.create(&slice("web-1", "web", &["10.1.0.1", "10.1.0.2"])?)?;
    // With this period, the agent's comparison of the maps with its own state does not repair the difference before the audit.
    let mut agent = node.start_with(&control.agent_kubeconfig(), &["--sync-period", "1h"])?;
    agent.says(&["first sync done"])?;
    agree(api, node)?;
    let mut store = KernelStore::open(&node.bpffs().join("ballast"))?;
    let found = store.read(u32::MAX)?;
    let (key, _) = found.services.iter().find(|(_, entry)| entry.slot_count == 2).context("no Service")?;
    store.write(&[Write::NoService(*key)]).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    agent.says(&["ERROR", DIFFERED])?;
    agree(api, node)?;
    ensure!(agent.count(&[DIFFERED])? == 1, "repaired more than once");
    Ok(())
}
