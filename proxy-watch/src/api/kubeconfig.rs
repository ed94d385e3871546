//! Reads a kubeconfig with the rules of client-go, where the client library has others.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use secrecy::ExposeSecret as _;

use super::files::default_kubeconfigs;

/// Returns the configuration of the kubeconfig at `path`; `None`: of the default kubeconfig.
pub async fn read(path: Option<&Path>, options: &KubeConfigOptions) -> Result<Config, KubeconfigError> {
    let (mut kubeconfig, paths) = match path {
        Some(path) => (Kubeconfig::read_from(path)?, vec![path.to_owned()]),
        None => (Kubeconfig::read()?, default_kubeconfigs()),
    };
    drop_empty(&mut kubeconfig, &paths);
    Config::from_custom_kubeconfig(kubeconfig, options).await
}

/// Removes empty strings: in Go, such a value is not set.
fn drop_empty(kubeconfig: &mut Kubeconfig, paths: &[PathBuf]) {
    // The library has made the paths absolute, so an empty one is the folder of its kubeconfig.
    let folders: Vec<_> = paths.iter().filter_map(|path| Some(path.parent()?.join(""))).collect();
    let is_empty = |text: &str| text.is_empty() || folders.iter().any(|folder| folder.as_os_str() == text);
    let mut texts = vec![&mut kubeconfig.current_context];
    let mut secrets = Vec::new();
    for context in kubeconfig.contexts.iter_mut().filter_map(|named| named.context.as_mut()) {
        texts.extend([&mut context.user, &mut context.namespace]);
    }
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        texts.extend([
            &mut cluster.server,
            &mut cluster.certificate_authority,
            &mut cluster.certificate_authority_data,
            &mut cluster.proxy_url,
            &mut cluster.tls_server_name,
        ]);
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        // A user with an empty password has one.
        if user.username.as_ref().is_none_or(String::is_empty) {
            secrets.push(&mut user.password);
        }
        secrets.extend([&mut user.token, &mut user.client_key_data]);
        texts.extend([
            &mut user.username,
            &mut user.token_file,
            &mut user.client_certificate,
            &mut user.client_certificate_data,
            &mut user.client_key,
            &mut user.impersonate,
            &mut user.impersonate_uid,
        ]);
    }
    for text in texts {
        drop(text.take_if(|text| is_empty(text)));
    }
    for secret in secrets {
        drop(secret.take_if(|secret| secret.expose_secret().is_empty()));
    }
}
