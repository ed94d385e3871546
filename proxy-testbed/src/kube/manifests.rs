//! The objects of `deploy/manifests`.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Returns the objects of a manifest file.
pub fn objects(file: &str) -> Result<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests").join(file);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let documents = text.split("\n---\n");
    documents.map(|document| serde_saphyr::from_str(document).with_context(|| document.to_owned())).collect()
}

/// Returns the agent's `ClusterRole` of the manifests.
pub fn role() -> Result<Value> {
    let all = objects("ballast.yaml")?;
    all.into_iter().find(|object| object["kind"] == "ClusterRole").context("no role in the manifests")
}
