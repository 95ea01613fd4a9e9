//! Contents of a certificate.

use std::fmt::Write as _;

use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::pki_types::CertificateDer;
use serde::Serialize;
use x509_parser::extensions::{ExtendedKeyUsage, GeneralName};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::other_forms::other_forms;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::identity::Identity;

/// Extended key usage of a policy key, in DER: 2.25 and the UUID faeedab9-097b-48c9-a1fc-a7639c8ac69f as one number,
/// which needs no registration (ITU-T X.667, 7).
pub(super) const POLICY_USAGE: &[u8] = &[
    0x69, 0x83, 0xf5, 0xee, 0xed, 0xae, 0xa1, 0x97, 0xda, 0xa3, 0x93, 0xa1, 0xfe, 0xa9, 0xec, 0xb9, 0xe4, 0xab, 0x8d,
    0x1f,
];

/// Contents of one certificate. Trust none of them before the certificate was verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Certificate {
    /// The agent that it is for, if it says `towline://SITE/AGENT`; else the workload, if its only URI is a SPIFFE id.
    #[serde(serialize_with = "as_text")]
    pub identity: Option<Identity>,
    /// DNS names of its subject, which agents ignore.
    pub dns_names: Vec<String>,
    /// True for the certificate of an authority.
    pub authority: bool,
    /// True if it is for signing policies and nothing else.
    pub policy: bool,
    /// Subject, as a distinguished name.
    pub subject: String,
    /// Issuer.
    pub issuer: String,
    /// Serial number, in hexadecimal digits.
    pub serial: String,
    /// SHA-256 of the whole certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// Fingerprints of its other forms: whoever has it can make them, and each is as valid.
    #[serde(skip)]
    pub(super) other_fingerprints: Vec<String>,
    /// Start of its validity.
    #[serde(serialize_with = "as_time")]
    pub not_before: Timestamp,
    /// End of its validity.
    #[serde(serialize_with = "as_time")]
    pub not_after: Timestamp,
}

impl Certificate {
    /// Reads a certificate.
    ///
    /// # Errors
    /// Damaged, if it is not a certificate.
    pub fn read(der: &CertificateDer<'_>) -> Result<Self> {
        let parsed = X509Certificate::from_der(der);
        let (_, certificate) = parsed.map_err(|source| Error::damaged("certificate is malformed").source(source))?;
        let time = |time: x509_parser::time::ASN1Time| Timestamp(time.timestamp().saturating_mul(1_000_000_000));
        let names = certificate.subject_alternative_name();
        let names = names.map_err(|source| Error::damaged("certificate's names are malformed").source(source))?;
        let names = names.map(|extension| extension.value.general_names.as_slice()).unwrap_or_default();
        let uris: Vec<&str> = names.iter().filter_map(uri).collect();
        let mut agents = uris.iter().filter(|uri| !uri.starts_with("spiffe:")).filter_map(|uri| uri.parse().ok());
        let identity: Option<Identity> = agents.next();
        if agents.next().is_some() {
            return Err(Error::damaged("certificate names several agents").expected("one towline://SITE/AGENT"));
        }
        // A SPIFFE certificate has exactly one URI (X509-SVID.md, 2); one that names an agent of ours is that.
        let workload = || match uris.as_slice() {
            [only] => Identity::spiffe(only).ok(),
            _ => None,
        };
        let identity = identity.or_else(workload);
        Ok(Self {
            identity,
            dns_names: names.iter().filter_map(dns_name).collect(),
            authority: certificate.is_ca(),
            policy: certificate.extended_key_usage().is_ok_and(|usage| usage.is_some_and(|one| only_policy(one.value))),
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            serial: serial(certificate.raw_serial()),
            fingerprint: fingerprint(der),
            other_fingerprints: other_forms(der).iter().map(|form| fingerprint(form)).collect(),
            not_before: time(certificate.validity().not_before),
            not_after: time(certificate.validity().not_after),
        })
    }

    /// Identity of its subject.
    ///
    /// # Errors
    /// Denied, if it names no agent.
    pub fn agent(&self) -> Result<&Identity> {
        self.identity.as_ref().ok_or_else(|| {
            Error::denied("certificate names no agent")
                .expected("a URI towline://SITE/AGENT among the subject's alternative names, or one SPIFFE id")
                .got(&self.subject)
                .help("issue it with `towline identity issue`, or set `uris` in cert-manager's Certificate")
        })
    }
}

fn uri<'a>(name: &GeneralName<'a>) -> Option<&'a str> {
    match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    }
}

fn dns_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    }
}

fn only_policy(usage: &ExtendedKeyUsage<'_>) -> bool {
    let ExtendedKeyUsage { any, server_auth, client_auth, code_signing, email_protection, time_stamping, .. } = *usage;
    let others = [any, server_auth, client_auth, code_signing, email_protection, time_stamping, usage.ocsp_signing];
    !others.contains(&true) && usage.other.len() == 1 && usage.other.iter().all(|oid| oid.as_bytes() == POLICY_USAGE)
}

/// Serial number without leading zero bytes, which only some tools show.
fn serial(bytes: &[u8]) -> String {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    hex(bytes.get(zeros..).unwrap_or_default())
}

/// Lower-case hexadecimal digits, two a byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes of hexadecimal digits.
#[must_use]
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes.filter(|_| rest.is_empty())
}

/// SHA-256, as other tools show it (`openssl x509 -fingerprint -sha256`).
fn fingerprint(der: &[u8]) -> String {
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
