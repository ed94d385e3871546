//! Tests against a TLS server that asks for client certificates.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use futures::TryStreamExt as _;
use http_body_util::BodyExt as _;
use kube::client::Body;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::*;
use crate::api::client::{Options, connect};
use crate::api::connect::is_tls;

struct Authority(String, Issuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self(pem, Issuer::new(params, key))
    }

    fn certificate(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.1).unwrap(), key)
    }

    /// Writes a new client certificate and its key, and returns the certificate.
    fn write(&self, folder: &Path) -> Vec<u8> {
        let (certificate, key) = self.certificate("client");
        std::fs::write(folder.join("client.crt"), certificate.pem()).unwrap();
        std::fs::write(folder.join("client.key"), key.serialize_pem()).unwrap();
        certificate.der().to_vec()
    }
}

/// The certificates of the clients that have connected.
type Clients = Arc<Mutex<Vec<Vec<u8>>>>;

/// Starts a server that answers each request with a body that does not end.
async fn serve(authority: &Authority) -> (u16, Clients) {
    let (certificate, key) = authority.certificate("127.0.0.1");
    let mut roots = RootCertStore::empty();
    let own = rcgen_der(&authority.0);
    roots.add(own).unwrap();
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_client_cert_verifier(verifier);
    let config = config.with_single_cert(vec![certificate.der().clone()], key).unwrap();
    let (acceptor, clients) = (TlsAcceptor::from(Arc::new(config)), Clients::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, seen) = (listener.local_addr().unwrap().port(), Arc::clone(&clients));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await.unwrap();
                let client = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
                seen.lock().unwrap().push(client);
                let mut head = [0; 4096];
                let _ = stream.read(&mut head).await;
                let answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
                stream.write_all(answer).await.unwrap();
                // Until the client closes the connection.
                while stream.read(&mut head).await.is_ok_and(|count| count > 0) {}
            });
        }
    });
    (port, clients)
}

fn rcgen_der(pem: &str) -> CertificateDer<'static> {
    use tokio_rustls::rustls::pki_types::pem::PemObject as _;
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

async fn connection(folder: &TempDir, authority: &Authority, port: u16) -> Connection {
    let path = folder.path().join("kubeconfig");
    std::fs::write(folder.path().join("ca.crt"), &authority.0).unwrap();
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: 'https://127.0.0.1:{port}', certificate-authority: ca.crt}}}}]\n\
         users: [{{name: u, user: {{client-certificate: client.crt, client-key: client.key}}}}]\n"
    );
    std::fs::write(&path, text).unwrap();
    let options = Options { kubeconfig: Some(path), servers: Vec::new() };
    connect(&options, watch::Sender::default()).await.unwrap()
}

/// Sends a request, and returns the body after its first bytes.
async fn open(connection: &Connection) -> Body {
    let request = http::Request::get("/").body(Body::empty()).unwrap();
    let mut body = connection.client.send(request).await.unwrap().into_body();
    let first = body.frame().await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), "abc");
    body
}

#[tokio::test]
async fn new_certificates_are_used_and_old_connections_end() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().unwrap());
    let first = authority.write(folder.path());
    let (port, clients) = serve(&authority).await;
    let mut connection = connection(&folder, &authority, port).await;
    let watch = open(&connection).await;
    assert!(renew_if_changed(&mut connection, false).await.is_none(), "nothing has changed");

    // The certificate is there, its key is not yet.
    let key = std::fs::read(folder.path().join("client.key")).unwrap();
    let second = authority.write(folder.path());
    let new_key = std::fs::read(folder.path().join("client.key")).unwrap();
    std::fs::write(folder.path().join("client.key"), &key).unwrap();
    let error = renew_if_changed(&mut connection, false).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("cannot set up the connection"), "{}", chain(&error));
    drop(open(&connection).await);
    assert!(clients.lock().unwrap().iter().all(|client| *client == first), "the previous one is in use");

    std::fs::write(folder.path().join("client.key"), new_key).unwrap();
    assert!(matches!(renew_if_changed(&mut connection, false).await, Some(Ok(()))));
    let rest = timeout(Duration::from_secs(10), watch.into_data_stream().try_collect::<Vec<_>>());
    assert!(rest.await.expect("the watch ends").unwrap().is_empty());
    let before = clients.lock().unwrap().len();
    drop(open(&connection).await);
    assert_eq!(clients.lock().unwrap()[before..], [second]);
    assert!(renew_if_changed(&mut connection, false).await.is_none());
}

#[tokio::test]
async fn a_new_authority_is_trusted() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().unwrap());
    authority.write(folder.path());
    let (port, _) = serve(&authority).await;
    let mut connection = connection(&folder, &authority, port).await;
    std::fs::write(folder.path().join("ca.crt"), Authority::new().0).unwrap();
    assert!(matches!(renew_if_changed(&mut connection, false).await, Some(Ok(()))));
    let request = || http::Request::get("/").body(Body::empty()).unwrap();
    let error = connection.client.send(request()).await.unwrap_err();
    assert!(is_tls(&error), "another authority: {error:?}");
    std::fs::write(folder.path().join("ca.crt"), &authority.0).unwrap();
    assert!(matches!(renew_if_changed(&mut connection, false).await, Some(Ok(()))));
    assert!(connection.client.send(request()).await.is_ok());
}

/// Starts a server that accepts only requests with this token.
async fn serve_token(token: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut head).await {
                    let is_known =
                        String::from_utf8_lossy(&head[..count]).contains(&format!("Bearer {token}"));
                    let status = if is_known { "200 OK" } else { "401 Unauthorized" };
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    port
}

/// Returns a connection with a token file, its folder and the path of the token file.
async fn with_token_file(port: u16, token: &str) -> (Connection, TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (path, token_file) = (folder.path().join("kubeconfig"), folder.path().join("token"));
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n\
         users: [{{name: u, user: {{tokenFile: '{}'}}}}]\n",
        token_file.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::write(&token_file, token).unwrap();
    let options = Options { kubeconfig: Some(path), servers: Vec::new() };
    (connect(&options, watch::Sender::default()).await.unwrap(), folder, token_file)
}

async fn status(connection: &Connection) -> u16 {
    let request = http::Request::get("/").body(Body::empty()).unwrap();
    connection.client.send(request).await.unwrap().status().as_u16()
}

#[tokio::test]
async fn token_file_is_read_again_after_401() {
    let (mut connection, _folder, token) = with_token_file(serve_token("second").await, "first").await;
    assert_eq!((status(&connection).await, connection.servers.is_unauthorized()), (401, true));
    std::fs::write(&token, "second").unwrap();
    assert_eq!(
        status(&connection).await,
        401,
        "the library reads the file again after 50 s of the wall clock"
    );
    assert!(matches!(renew_if_changed(&mut connection, true).await, Some(Ok(()))));
    assert_eq!((status(&connection).await, connection.servers.is_unauthorized()), (200, false));
}

#[tokio::test]
async fn token_file_with_line_break_is_trimmed_and_followed() {
    let (mut connection, _folder, token) = with_token_file(serve_token("first\r\n").await, "first\n").await;
    assert_eq!(status(&connection).await, 200);
    std::fs::write(&token, " other\n").unwrap();
    assert!(matches!(renew_if_changed(&mut connection, false).await, Some(Ok(()))));
    assert_eq!(status(&connection).await, 401);
}

#[tokio::test]
async fn invalid_new_token_keeps_the_previous_one() {
    let (mut connection, folder, _) = with_token_file(serve_token("first\r\n").await, "first").await;
    let path = folder.path().join("kubeconfig");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, _) = text.split_once("tokenFile").unwrap();
    std::fs::write(&path, format!("{before}token: \"fi\\nrst\"}}}}]\n")).unwrap();
    let error = renew_if_changed(&mut connection, false).await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("the token of the API server's user"), "{error}");
    assert_eq!(status(&connection).await, 200);
    std::fs::write(&path, format!("{before}token: \"first\\n\"}}}}]\n")).unwrap();
    assert!(matches!(renew_if_changed(&mut connection, false).await, Some(Ok(()))));
    assert_eq!(status(&connection).await, 200);
}

#[tokio::test]
async fn kubeconfig_with_another_server_is_refused() {
    let (authority, folder) = (Authority::new(), tempfile::tempdir().unwrap());
    authority.write(folder.path());
    let mut known = connection(&folder, &authority, 1).await;
    // Rewrites the same file.
    drop(connection(&folder, &authority, 2).await);
    let error = renew_if_changed(&mut known, false).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("https://127.0.0.1:2") && error.contains("restart the agent"), "{error}");
    drop(connection(&folder, &authority, 1).await);
    assert!(renew_if_changed(&mut known, false).await.is_none(), "it is as it was");
}
