//! Trusts the certificates of the CA file with the rules of Go's `crypto/x509`: each of them may also be the server's own.

use std::sync::Arc;

use kube::client::ConfigExt as _;
use kube::{Config, Error, Result};
use tokio_rustls::rustls;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tracing::warn;
use webpki::{EndEntityCert, KeyUsage};

/// Removes certificates that cannot be decoded from the CA, as Go does, while another one can be.
pub fn skip_undecodable(config: &mut Config) {
    let Some(certificates) = &mut config.root_cert else { return };
    let is_usable = |der: &Vec<u8>| RootCertStore::empty().add(CertificateDer::from(&**der)).is_ok();
    let given = certificates.len();
    if certificates.iter().any(is_usable) {
        certificates.retain(is_usable);
    }
    let skipped = given - certificates.len();
    if skipped > 0 {
        warn!(
            skipped,
            "the CA of the API server contains certificates that cannot be decoded; using the others"
        );
    }
}

/// Returns the TLS configuration of the client library, which trusts the CA's certificates as Go does.
pub fn tls(mut config: Config) -> Result<ClientConfig> {
    // Its verifier reads the file again, with rules of its own; the agent follows the file itself.
    config.root_cert_file = None;
    let mut tls = config.rustls_client_config()?;
    if let Some(certificates) = config.root_cert.filter(|_| !config.accept_invalid_certs) {
        let certificates: Vec<_> = certificates.into_iter().map(CertificateDer::from).collect();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates.iter().cloned());
        let issued = WebPkiServerVerifier::builder(Arc::new(roots)).build();
        let issued = issued.map_err(|error| Error::Service(Box::new(error)))?;
        tls.dangerous().set_certificate_verifier(Arc::new(Verifier { certificates, issued }));
    }
    Ok(tls)
}

#[derive(Debug)]
struct Verifier {
    /// The certificates of the CA file.
    certificates: Vec<CertificateDer<'static>>,
    /// Verifies certificates that these have issued.
    issued: Arc<WebPkiServerVerifier>,
}

impl Verifier {
    /// Whether a certificate is one of the CA file, and its dates and purposes are good: the only fault of its chain is that there is none.
    fn trusts(&self, certificate: &CertificateDer<'_>, now: UnixTime) -> bool {
        let verify = |certificate: EndEntityCert<'_>| {
            certificate.verify_for_usage(&[], &[], &[], now, KeyUsage::server_auth(), None, None).err()
        };
        self.certificates.contains(certificate)
            && matches!(
                EndEntityCert::try_from(certificate).map(verify),
                Ok(Some(webpki::Error::UnknownIssuer | webpki::Error::CaUsedAsEndEntity))
            )
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if self.trusts(end_entity, now) {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            return Ok(ServerCertVerified::assertion());
        }
        self.issued.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.issued.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.issued.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.issued.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests;
