//! TLS between agents: version 1.3, certificates on both sides, no session resumption.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError,
    ServerConfig, SignatureScheme,
};

use super::Credentials;
use super::certificate::Certificate;
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::transfer::protocol::limits::ALPN;

/// TLS configuration of the client.
///
/// # Errors
/// Other, if the available cryptography lacks what is needed.
pub fn client_config(credentials: &Credentials) -> Result<ClientConfig> {
    let shown = Arc::new(CurrentCertificates(credentials.clone()));
    let builder = ClientConfig::builder_with_details(provider(), Arc::new(Times(Arc::clone(credentials.clock()))));
    let builder = builder.with_protocol_versions(&[&TLS13]).map_err(unavailable)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::clone(&shown) as _);
    let mut config = builder.with_client_cert_resolver(shown);
    // A resumed session is not verified again, and the certificate might have been revoked meanwhile.
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// TLS configuration of the server.
///
/// # Errors
/// As [`client_config`].
pub fn server_config(credentials: &Credentials) -> Result<ServerConfig> {
    let shown = Arc::new(CurrentCertificates(credentials.clone()));
    let builder = ServerConfig::builder_with_details(provider(), Arc::new(Times(Arc::clone(credentials.clock()))));
    let builder = builder.with_protocol_versions(&[&TLS13]).map_err(unavailable)?;
    let builder = builder.with_client_cert_verifier(Arc::clone(&shown) as _);
    let mut config = builder.with_cert_resolver(shown);
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn unavailable(source: rustls::Error) -> Error {
    Error::other("TLS 1.3 is not at hand").source(source)
}

/// Server name, which TLS requires; agents are verified by their identity instead.
pub const SERVER_NAME: &str = "towline";

/// Identity in the certificates of the other side; for connections whose handshake, which verifies them, is done.
///
/// # Errors
/// Denied, if there is none, or if it is not `expected`.
pub fn peer_identity(certificates: Option<&[CertificateDer<'_>]>, expected: Option<&Identity>) -> Result<Identity> {
    let shown = certificates.and_then(<[_]>::first).ok_or_else(|| Error::denied("peer has shown no certificate"))?;
    let identity = Certificate::read(shown)?.agent()?.clone();
    match expected {
        Some(expected) if *expected != identity => {
            Err(Error::denied("another agent answers").expected(expected).got(identity))
        }
        _ => Ok(identity),
    }
}

/// Error of a TLS failure.
#[must_use]
pub fn refused(error: rustls::Error) -> Error {
    use CertificateError as Bad;
    let what = match &error {
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::Expired | Bad::ExpiredContext { .. } => "certificate has expired",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => "certificate is not valid yet",
            // Two authorities may have the same name: then only the signature distinguishes them.
            Bad::UnknownIssuer | Bad::BadSignature => "certificate was signed by an authority that is not trusted",
            Bad::Revoked => "certificate was revoked",
            _ => "certificate is not accepted",
        },
        rustls::Error::NoCertificatesPresented => "peer has shown no certificate",
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateExpired => "peer says that our certificate has expired",
            AlertDescription::CertificateRevoked => "peer says that our certificate was revoked",
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "peer does not trust the authority of our certificate"
            }
            AlertDescription::CertificateRequired => "peer requires a certificate",
            AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
                "peer does not accept our certificate"
            }
            AlertDescription::NoApplicationProtocol => "peer speaks another protocol",
            _ => "peer ended the handshake",
        },
        _ => return Error::unreachable("TLS with the peer broke").source(error),
    };
    let help = "`towline identity show` shows certificates, and the authorities in ca.crt";
    Error::denied(what).help(help).source(error)
}

/// Error of a certificate that is signed but has the wrong contents.
pub(super) fn unusable(error: Error) -> rustls::Error {
    CertificateError::Other(OtherError(Arc::new(error))).into()
}

/// Seeds the random generator of this process, beside other work. AWS-LC measures the jitter of the CPU for it, for some 80 ms
/// (<https://github.com/aws/aws-lc/tree/main/third_party/jitterentropy>), for which the first handshake would wait. Needs a runtime.
pub fn seed_random_generator() {
    // A failure is one of the handshake, too.
    tokio::task::spawn_blocking(|| default_provider().secure_random.fill(&mut [0; 32]));
}

/// AES-128-GCM first: about 1.2 times as fast as AES-256-GCM, and as secure for this purpose.
pub(super) fn provider() -> Arc<CryptoProvider> {
    let cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites, ..default_provider() })
}

/// Adapter of our clock for TLS.
#[derive(Debug)]
struct Times(Arc<dyn Clock>);

impl TimeProvider for Times {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(self.0.now().since(Timestamp(0))))
    }
}

/// Shows and verifies certificates by the current credentials.
#[derive(Debug)]
struct CurrentCertificates(Credentials);

impl CurrentCertificates {
    fn verify_signature(
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &provider().signature_verification_algorithms)
    }
}

impl ResolvesServerCert for CurrentCertificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.current().own))
    }
}

impl ResolvesClientCert for CurrentCertificates {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.current().own))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ServerCertVerifier for CurrentCertificates {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.0.current().verify_server(end_entity, intermediates, now).map(|_| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::verify_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for CurrentCertificates {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0.current().verify_client(end_entity, intermediates, now).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::verify_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
