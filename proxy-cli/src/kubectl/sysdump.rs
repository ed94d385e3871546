//! `kubectl ballast sysdump`: one archive with the archives of all nodes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;

use super::answers::Outcome;
use super::cluster::Cluster;
use super::error::KubectlError;
use crate::archive::{SysdumpError, append, output};
use proxy_core::model::plural::plural;

/// Asks each node for its archive, and writes them as `NODE.tar.gz` of one folder. A node without archive is a line in
/// `failures.txt`.
pub(super) async fn run(cluster: &Cluster, file: Option<&Path>) -> Result<Outcome, KubectlError> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let folder = format!("ballast-sysdump-{time}");
    let path = file.map_or_else(|| PathBuf::from(format!("{folder}.tar")), Path::to_owned);
    let failed = |source| SysdumpError::File { path: path.clone(), source };
    let agents = cluster.agents().await?;
    let mut tar = tar::Builder::new(output(&path)?);
    let mut add = |name: &str, content: &[u8]| append(&mut tar, &format!("{folder}/{name}"), time, content);
    let (mut nodes, mut all) = (0, Outcome::new(String::new(), true));
    let mut answers = std::pin::pin!(cluster.ask_each(agents, &["sysdump", "-"]));
    while let Some((node, answer)) = answers.next().await {
        let why = match answer {
            Ok(Outcome { stdout, is_well: true, .. }) => {
                nodes += 1;
                add(&format!("{node}.tar.gz"), &stdout).map_err(failed)?;
                continue;
            }
            Ok(Outcome { stderr, .. }) => stderr,
            Err(why) => why,
        };
        all.is_well = false;
        all.note(&node, &why);
    }
    if !all.is_well {
        add("failures.txt", all.stderr.as_bytes()).map_err(failed)?;
    }
    tar.into_inner().and_then(|mut out| out.flush()).map_err(failed)?;
    let to_stdout = path.as_os_str() == "-";
    let said = if to_stdout { &mut all.stderr } else { &mut all.stdout };
    let line = format!("{}: archives of {}\n", path.display(), plural(nodes, "node"));
    said.push_str(&line);
    Ok(all)
}
