//! Contents of a certificate.

use std::fmt::Write as _;

use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::pki_types::CertificateDer;
use serde::Serialize;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::Identity;
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// The facts of one certificate; none of them is to be believed before the certificate was verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Certificate {
    /// The agent that it is for, if it says `towline://SITE/AGENT`.
    #[serde(serialize_with = "as_text")]
    pub identity: Option<Identity>,
    /// True for a certificate of an authority.
    pub authority: bool,
    /// Whom it is for, as a distinguished name.
    pub subject: String,
    /// Issuer.
    pub issuer: String,
    /// Its number, in hexadecimal digits.
    pub serial: String,
    /// SHA-256 of all of it, in hexadecimal digits.
    pub fingerprint: String,
    /// It holds from then on.
    #[serde(serialize_with = "as_time")]
    pub not_before: Timestamp,
    /// It holds until then.
    #[serde(serialize_with = "as_time")]
    pub not_after: Timestamp,
}

impl Certificate {
    /// Reads a certificate.
    ///
    /// # Errors
    /// Damaged, if it is none.
    pub fn read(der: &CertificateDer<'_>) -> Result<Self> {
        let parsed = X509Certificate::from_der(der);
        let (_, certificate) = parsed.map_err(|source| Error::damaged("certificate is malformed").source(source))?;
        let time = |time: x509_parser::time::ASN1Time| Timestamp(time.timestamp().saturating_mul(1_000_000_000));
        let names = certificate.subject_alternative_name();
        let names = names.map_err(|source| Error::damaged("certificate's names are malformed").source(source))?;
        let names = names.map(|extension| extension.value.general_names.as_slice()).unwrap_or_default();
        let mut identities = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => uri.parse().ok(),
            _ => None,
        });
        let identity = identities.next();
        if identities.next().is_some() {
            return Err(Error::damaged("certificate names several agents").expected("one towline://SITE/AGENT"));
        }
        Ok(Self {
            identity,
            authority: certificate.is_ca(),
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            serial: serial(certificate.raw_serial()),
            fingerprint: fingerprint(der),
            not_before: time(certificate.validity().not_before),
            not_after: time(certificate.validity().not_after),
        })
    }

    /// Whom it is for.
    ///
    /// # Errors
    /// Denied, if it names no agent.
    pub fn agent(&self) -> Result<&Identity> {
        self.identity.as_ref().ok_or_else(|| {
            Error::denied("certificate names no agent")
                .expected("a URI towline://SITE/AGENT among the subject's alternative names")
                .got(&self.subject)
                .help("issue it with `towline identity issue`, or set `uris` in cert-manager's Certificate")
        })
    }
}

/// A serial number without the zero bytes in front, which some tools show and some do not.
fn serial(bytes: &[u8]) -> String {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    hex(bytes.get(zeros..).unwrap_or_default())
}

/// Lower-case hexadecimal digits, two a byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256, which is what every other tool shows (`openssl x509 -fingerprint -sha256`).
fn fingerprint(der: &CertificateDer<'_>) -> String {
    let suite = TLS13_AES_128_GCM_SHA256.tls13();
    suite.map(|suite| hex(suite.common.hash_provider.hash(der).as_ref())).unwrap_or_default()
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn as_text<S: serde::Serializer>(identity: &Option<Identity>, serializer: S) -> Result<S::Ok, S::Error> {
    identity.as_ref().map(ToString::to_string).serialize(serializer)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn as_time<S: serde::Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(time)
}
