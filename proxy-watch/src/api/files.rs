//! The files of certificates, keys and tokens, which a client may read only once.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use kube::config::Kubeconfig;

/// The folder of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

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
            let files = [user.client_certificate, user.client_key, user.token_file];
            paths.extend(files.into_iter().flatten().map(PathBuf::from));
        }
        match kubeconfig {
            Some(kubeconfig) => drop(paths.insert(kubeconfig.to_owned())),
            None => {
                paths.extend(default_kubeconfigs());
                paths.extend(files_of_pod(Path::new(SERVICE_ACCOUNT)));
            }
        }
        let mut hasher = DefaultHasher::new();
        for path in &paths {
            std::fs::read(path).ok().hash(&mut hasher);
        }
        Self { paths, content: hasher.finish() }
    }
}

/// Returns the files of a service account that the client library does not follow: the CA, and a token with white space around it.
fn files_of_pod(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let token = folder.join("token");
    let is_trimmed = std::fs::read_to_string(&token).is_ok_and(|token| token.trim() != token);
    std::iter::once(folder.join("ca.crt")).chain(is_trimmed.then_some(token))
}

/// Whether this is a pod with a service account.
pub(super) fn has_service_account() -> bool {
    Path::new(SERVICE_ACCOUNT).join("token").exists()
}

/// Returns the files that hold the default kubeconfig, whether they exist or not: those of `KUBECONFIG`, else `~/.kube/config`.
pub(super) fn default_kubeconfigs() -> Vec<PathBuf> {
    kubeconfigs_of(std::env::var_os("KUBECONFIG"))
}

fn kubeconfigs_of(given: Option<OsString>) -> Vec<PathBuf> {
    match given.filter(|given| !given.is_empty()) {
        Some(given) => std::env::split_paths(&given).filter(|path| !path.as_os_str().is_empty()).collect(),
        None => std::env::home_dir().map(|home| home.join(".kube/config")).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_account_token_with_newline_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let of = |token| {
            std::fs::write(folder.path().join("token"), token).unwrap();
            files_of_pod(folder.path()).collect::<Vec<_>>()
        };
        assert_eq!(of("abc"), [folder.path().join("ca.crt")]);
        assert_eq!(of("abc\n"), [folder.path().join("ca.crt"), folder.path().join("token")]);
    }

    #[test]
    fn default_kubeconfig_without_the_variable_is_that_of_the_user() {
        let of = |given: &str| kubeconfigs_of(Some(given.into()));
        assert_eq!(of("/a:/b::"), [Path::new("/a"), Path::new("/b")]);
        let own = kubeconfigs_of(None);
        assert!(own.iter().all(|path| path.ends_with(".kube/config")) && own == of(""), "{own:?}");
    }
}
