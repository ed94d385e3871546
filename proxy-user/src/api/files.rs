//! The files of certificates and keys, which a client reads once.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use kube::config::Kubeconfig;

/// The files that a client reads once, with a hash of their content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    paths: BTreeSet<PathBuf>,
    content: u64,
}

impl Files {
    /// Reads the files that a kubeconfig names, and the kubeconfig; `None`: the default kubeconfig, if there is one.
    pub(super) fn of(kubeconfig: Option<&Path>) -> Self {
        let read = kubeconfig.map_or_else(Kubeconfig::read, Kubeconfig::read_from);
        let Kubeconfig { clusters, auth_infos, .. } = read.unwrap_or_default();
        let clusters = clusters.into_iter().filter_map(|one| one.cluster);
        let users = auth_infos.into_iter().filter_map(|one| one.auth_info);
        let mut paths: BTreeSet<PathBuf> =
            clusters.filter_map(|cluster| cluster.certificate_authority).map(PathBuf::from).collect();
        for user in users {
            paths.extend([user.client_certificate, user.client_key].into_iter().flatten().map(PathBuf::from));
        }
        paths.extend(kubeconfig.map(Path::to_owned));
        let mut hasher = DefaultHasher::new();
        for path in &paths {
            std::fs::read(path).ok().hash(&mut hasher);
        }
        Self { paths, content: hasher.finish() }
    }
}
