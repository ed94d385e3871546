//! What `deploy/manifests` holds.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The objects of a file of manifests.
pub fn objects(file: &str) -> Result<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests").join(file);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let documents = text.split("\n---\n");
    documents.map(|document| serde_saphyr::from_str(document).with_context(|| document.to_owned())).collect()
}

/// The role that the manifests give the agent.
pub fn role() -> Result<Value> {
    let all = objects("ballast.yaml")?;
    all.into_iter().find(|object| object["kind"] == "ClusterRole").context("no role in the manifests")
}
