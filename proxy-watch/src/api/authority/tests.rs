use rcgen::{
    BasicConstraints, Certificate, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::{ClientConnection, ServerConfig, ServerConnection};

use super::*;

/// A certificate for `localhost` and its key.
struct Identity(Certificate, KeyPair);

fn identity(issuer: Option<&Issuer<'_, KeyPair>>, change: impl FnOnce(&mut CertificateParams)) -> Identity {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    change(&mut params);
    let certificate = match issuer {
        Some(issuer) => params.signed_by(&key, issuer),
        None => params.self_signed(&key),
    };
    Identity(certificate.unwrap(), key)
}

fn is_ca(params: &mut CertificateParams) {
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
}

fn issuer() -> (Identity, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    is_ca(&mut params);
    let certificate = params.self_signed(&key).unwrap();
    (Identity(certificate, KeyPair::generate().unwrap()), Issuer::new(params, key))
}

fn config(trusted: &[&Identity]) -> Config {
    let mut config = Config::new("https://localhost".parse().unwrap());
    config.root_cert = Some(trusted.iter().map(|identity| identity.0.der().to_vec()).collect());
    config
}

/// Connects to a server with this certificate as `name`, with these certificates in the CA file.
fn connect(trusted: &[&Identity], server: &Identity, name: &'static str) -> Result<(), rustls::Error> {
    let tls = tls(config(trusted)).unwrap();
    let mut client = ClientConnection::new(Arc::new(tls), name.try_into().unwrap()).unwrap();
    let key = PrivateKeyDer::try_from(server.1.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![server.0.der().clone()], key).unwrap();
    let mut server = ServerConnection::new(Arc::new(config)).unwrap();
    while client.is_handshaking() {
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        server.read_tls(&mut &*bytes).unwrap();
        server.process_new_packets().unwrap();
        bytes.clear();
        server.write_tls(&mut bytes).unwrap();
        let mut rest = &*bytes;
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets()?;
        }
    }
    Ok(())
}

#[test]
fn certificate_of_the_server_in_the_ca_file_is_trusted() {
    let (_, unknown) = issuer();
    for server in [identity(Some(&unknown), |_| ()), identity(None, |_| ()), identity(None, is_ca)] {
        let (other, _) = issuer();
        connect(&[&other, &server], &server, "localhost").unwrap();
        assert!(connect(&[&server], &server, "other").is_err(), "its name is checked");
        assert!(connect(&[&other], &server, "localhost").is_err(), "it is not in the file");
    }
    let (ca, issuer) = issuer();
    connect(&[&ca], &identity(Some(&issuer), |_| ()), "localhost").unwrap();
    let pinned = identity(Some(&unknown), |_| ());
    assert!(
        connect(&[&pinned], &identity(Some(&unknown), |_| ()), "localhost").is_err(),
        "another certificate"
    );
}

#[test]
fn invalid_pinned_certificate_is_refused() {
    let (_, unknown) = issuer();
    let expired = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let future = |params: &mut CertificateParams| params.not_before = rcgen::date_time_ymd(4000, 1, 1);
    let for_clients = |params: &mut CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    };
    let expired_ca = |params: &mut CertificateParams| {
        is_ca(params);
        expired(params);
    };
    for server in [
        identity(Some(&unknown), expired),
        identity(Some(&unknown), future),
        identity(Some(&unknown), for_clients),
        identity(None, expired_ca),
    ] {
        assert!(connect(&[&server], &server, "localhost").is_err());
    }
}

#[test]
fn undecodable_certificate_is_skipped() {
    let (ca, _) = issuer();
    let mut config = config(&[&ca]);
    let usable = config.root_cert.clone();
    config.root_cert.as_mut().unwrap().push(vec![0; 3]);
    skip_undecodable(&mut config);
    assert_eq!(config.root_cert, usable);
    config.root_cert = Some(vec![vec![0; 3]]);
    skip_undecodable(&mut config);
    assert!(tls(config).is_err());
}
