//! Detached signatures by certified keys: of agents, and of the policy key.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, SignatureScheme};
use webpki::{EndEntityCert, KeyUsage};

use super::certificate::{Certificate, POLICY_USAGE, from_hex, hex};
use super::credentials::{Credentials, INTERMEDIATES_MAX};
use super::files::{self, AUTHORITY, POLICY_CERTIFICATE, POLICY_KEY, REVOKED};
use super::revoked::{List, Revoked};
use super::{pem, tls};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};

/// Maximum length of a signature with its certificates.
pub const SIGNATURE_LEN_MAX: usize = 32 << 10;
/// Maximum number of certificates in one signature: the signer's and the intermediate ones.
const CHAIN_MAX: usize = 1 + INTERMEDIATES_MAX;
/// First byte of the byte form.
const VERSION: u8 = 1;
/// Schemes that are made and accepted: those of TLS 1.3 that sign the whole message.
const SCHEMES: [SignatureScheme; 5] = [
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::RSA_PSS_SHA256,
];

/// Kind of certificate that a signature needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Certificate that names an agent, `towline://SITE/AGENT`, as TLS between agents needs it.
    Agent,
    /// Certificate whose only extended key usage is to sign policies (docs/security.md has the number).
    Policy,
}

/// Kind of signed statement. A signature of one kind never passes for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Head of an agent's audit log.
    AuditHead,
    /// Head of an agent's inventory.
    Inventory,
    /// Usage of a month by an agent.
    Usage,
    /// A policy.
    Policy,
    /// Declassification of one name.
    Declassification,
}

impl Context {
    /// Kind of certificate that may sign it.
    #[must_use]
    pub const fn purpose(self) -> Purpose {
        match self {
            Self::AuditHead | Self::Inventory | Self::Usage => Purpose::Agent,
            Self::Policy | Self::Declassification => Purpose::Policy,
        }
    }

    /// First bytes of the signed message. Each ends with a zero byte, so that none is a prefix of another.
    const fn prefix(self) -> &'static [u8] {
        match self {
            Self::AuditHead => b"towline audit head v1\0",
            Self::Inventory => b"towline inventory v1\0",
            Self::Usage => b"towline usage v1\0",
            Self::Policy => b"towline policy v1\0",
            Self::Declassification => b"towline declassification v1\0",
        }
    }

    fn message(self, message: &[u8]) -> Vec<u8> {
        [self.prefix(), message].concat()
    }
}

/// Signature, with the certificates from its key to an authority.
///
/// Bytes: 1 (the version), the number of certificates (u8), each as its length (u32) and DER, the scheme by its number in TLS
/// (u16), the length of the signature (u16) and its bytes; numbers are little-endian. As text, these bytes in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    chain: Vec<CertificateDer<'static>>,
    scheme: SignatureScheme,
    bytes: Vec<u8>,
}

impl Signature {
    pub(super) fn make(own: &CertifiedKey, context: Context, message: &[u8]) -> Result<Self> {
        let signer = own.key.choose_scheme(&SCHEMES);
        let signer = signer.ok_or_else(|| {
            Error::unsupported("key cannot sign").expected("an ECDSA, Ed25519 or RSA key").help("make another key")
        })?;
        let bytes = signer.sign(&context.message(message));
        let bytes = bytes.map_err(|source| Error::other("key cannot sign").source(source))?;
        Ok(Self { chain: own.cert.clone(), scheme: signer.scheme(), bytes })
    }

    /// Signer's certificate. Do not trust it before the signature was verified.
    ///
    /// # Errors
    /// Damaged, if there is none.
    pub fn signer(&self) -> Result<Certificate> {
        Certificate::read(self.chain.first().ok_or_else(|| Error::damaged("signature has no certificate"))?)
    }

    /// Byte form.
    ///
    /// # Errors
    /// Usage, if its certificates are more or longer than a signature may have.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut encoded = vec![VERSION, u8::try_from(self.chain.len()).unwrap_or(u8::MAX)];
        for certificate in &self.chain {
            encoded.extend(u32::try_from(certificate.len()).unwrap_or(u32::MAX).to_le_bytes());
            encoded.extend_from_slice(certificate);
        }
        encoded.extend(u16::from(self.scheme).to_le_bytes());
        encoded.extend(u16::try_from(self.bytes.len()).unwrap_or(u16::MAX).to_le_bytes());
        encoded.extend_from_slice(&self.bytes);
        if self.chain.len() > CHAIN_MAX || encoded.len() > SIGNATURE_LEN_MAX {
            return Err(Error::usage("certificates are too many or too long for a signature")
                .expected(format!("at most {CHAIN_MAX}, and {SIGNATURE_LEN_MAX} bytes"))
                .got(format!("{}, and {} bytes", self.chain.len(), encoded.len())));
        }
        Ok(encoded)
    }

    /// The signature in `bytes`.
    ///
    /// # Errors
    /// Damaged, if there is none.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = || Error::damaged("signature is malformed");
        if bytes.len() > SIGNATURE_LEN_MAX {
            return Err(malformed().expected(format!("at most {SIGNATURE_LEN_MAX} bytes")).got(bytes.len()));
        }
        Self::parse(bytes).ok_or_else(malformed)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (&[version, count], mut rest) = bytes.split_first_chunk()?;
        if version != VERSION || !(1..=CHAIN_MAX).contains(&usize::from(count)) {
            return None;
        }
        let mut chain = Vec::new();
        for _ in 0..count {
            let (len, after) = rest.split_first_chunk()?;
            let (certificate, after) = after.split_at_checked(usize::try_from(u32::from_le_bytes(*len)).ok()?)?;
            chain.push(CertificateDer::from(certificate.to_vec()));
            rest = after;
        }
        let (scheme, rest) = rest.split_first_chunk()?;
        let (len, bytes) = rest.split_first_chunk()?;
        let whole = bytes.len() == usize::from(u16::from_le_bytes(*len));
        let scheme = SignatureScheme::from(u16::from_le_bytes(*scheme));
        whole.then(|| Self { chain, scheme, bytes: bytes.to_vec() })
    }

    fn holds(&self, signer: &EndEntityCert<'_>, message: &[u8]) -> bool {
        let known = tls::provider().signature_verification_algorithms.mapping;
        let found = known.iter().filter(|(scheme, _)| *scheme == self.scheme && SCHEMES.contains(scheme));
        let mut algorithms = found.flat_map(|(_, algorithms)| *algorithms);
        algorithms.any(|algorithm| signer.verify_signature(*algorithm, message, &self.bytes).is_ok())
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encoded = self.encode().map_err(|_| fmt::Error)?;
        f.write_str(&hex(&encoded))
    }
}

impl FromStr for Signature {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = || Error::damaged("signature is malformed").expected("hexadecimal digits");
        if text.len() > 2 * SIGNATURE_LEN_MAX {
            return Err(malformed().got(format!("{} characters", text.len())));
        }
        Self::decode(&from_hex(text).ok_or_else(malformed)?)
    }
}

impl Credentials {
    /// Signs `message` with the key of this agent.
    ///
    /// # Errors
    /// Denied, if an agent may not sign this; unsupported, if the key cannot sign.
    pub fn sign(&self, context: Context, message: &[u8]) -> Result<Signature> {
        if context.purpose() != Purpose::Agent {
            return Err(Error::denied("an agent's key does not sign this").expected("a policy key"));
        }
        Signature::make(&self.current().own, context, message)
    }

    /// Trusted authorities and revoked certificates of this agent.
    #[must_use]
    pub fn trusted(&self) -> Trusted {
        let current = self.current();
        Trusted { roots: Arc::clone(current.roots()), revoked: Arc::clone(current.revoked()) }
    }
}

/// Policy key, with its certificate.
#[derive(Debug)]
pub struct PolicyKey {
    pub(super) own: CertifiedKey,
    certificate: Certificate,
}

impl PolicyKey {
    /// Opens the key in `folder`: `policy.key` and `policy.crt`, as `towline identity issue-policy` writes them.
    ///
    /// # Errors
    /// Not found, if there is none; damaged, if the files are not a key and its certificate; denied, if it is for
    /// another purpose.
    pub fn open(folder: &Path) -> Result<Self> {
        let (path, key_path) = (folder.join(POLICY_CERTIFICATE), folder.join(POLICY_KEY));
        let missing = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::not_found("there is no policy key")
                .at(folder.display())
                .expected(format!("{POLICY_CERTIFICATE} and {POLICY_KEY}"))
                .help(format!("towline identity issue-policy --to {}", folder.display()))
                .source(error),
            _ => error,
        };
        let chain = pem::certificates(&files::read(&path).map_err(missing)?, &path)?;
        let key = pem::key(&files::read(&key_path).map_err(missing)?, &key_path)?;
        let own = CertifiedKey::from_der(chain, key, &tls::provider()).map_err(|source| {
            Error::damaged("policy.key is not the key of policy.crt").at(folder.display()).source(source)
        })?;
        let certificate = own.end_entity_cert().map_err(|source| Error::damaged("no certificate").source(source))?;
        let certificate = Certificate::read(certificate)?;
        check_purpose(&certificate, Purpose::Policy).map_err(|error| error.at(path.display()))?;
        Ok(Self { own, certificate })
    }

    /// Its certificate.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Signs `message`.
    ///
    /// # Errors
    /// Denied, if a policy key may not sign this; unsupported, if the key cannot sign.
    pub fn sign(&self, context: Context, message: &[u8]) -> Result<Signature> {
        if context.purpose() != Purpose::Policy {
            return Err(Error::denied("a policy key does not sign this").expected("an agent's key"));
        }
        Signature::make(&self.own, context, message)
    }
}

/// Trusted authorities, and revoked certificates.
#[derive(Clone, Debug)]
pub struct Trusted {
    roots: Arc<RootCertStore>,
    revoked: Arc<List>,
}

impl Trusted {
    /// Reads the authorities at `path`: a file of certificates, or a folder with `ca.crt` and perhaps `revoked`.
    ///
    /// # Errors
    /// Not found, if there are none; damaged, if one is unusable; errors of the file system.
    pub fn read(path: &Path, now: Timestamp) -> Result<Self> {
        let (file, revoked) = if path.is_dir() {
            (path.join(AUTHORITY), Arc::clone(Revoked::open(path.join(REVOKED), now)?.list()))
        } else {
            (path.to_owned(), Arc::default())
        };
        Ok(Self { roots: Arc::new(pem::roots(&files::read(&file)?, &file)?), revoked })
    }

    /// Signer of `message`, if a trusted authority had certified it for that at the time `at`.
    ///
    /// # Errors
    /// Denied, with the reason.
    pub fn verify(
        &self,
        signature: &Signature,
        context: Context,
        message: &[u8],
        at: Timestamp,
    ) -> Result<Certificate> {
        let unusable = |source: webpki::Error| Error::damaged("certificate of the signer is unusable").source(source);
        let (first, between) =
            signature.chain.split_first().ok_or_else(|| Error::damaged("signature has no certificate"))?;
        let signer = EndEntityCert::try_from(first).map_err(unusable)?;
        let usage = match context.purpose() {
            Purpose::Agent => KeyUsage::client_auth(),
            // Required of the signer below; intermediate certificates need not have it.
            Purpose::Policy => KeyUsage::required_if_present(POLICY_USAGE),
        };
        let now = UnixTime::since_unix_epoch(at.since(Timestamp(0)));
        let algorithms = tls::provider().signature_verification_algorithms.all;
        signer.verify_for_usage(algorithms, &self.roots.roots, between, now, usage, None, None).map_err(untrusted)?;
        let certificate = Certificate::read(first)?;
        let between = between.iter().map(Certificate::read).collect::<Result<Vec<_>>>()?;
        if between.iter().chain([&certificate]).any(|one| self.revoked.holds(one)) {
            return Err(Error::denied("certificate of the signer was revoked").got(certificate.fingerprint));
        }
        check_purpose(&certificate, context.purpose())?;
        if !signature.holds(&signer, &context.message(message)) {
            let error = Error::denied("signature does not match the signed content");
            return Err(error.help("it was changed since: look at it, and sign it again"));
        }
        Ok(certificate)
    }
}

/// Refuses a certificate with another purpose than `purpose`.
fn check_purpose(certificate: &Certificate, purpose: Purpose) -> Result<()> {
    match purpose {
        Purpose::Agent if certificate.policy => Err(Error::denied("certificate is for policy, not for an agent")),
        Purpose::Agent => certificate.agent().map(drop),
        Purpose::Policy if !certificate.policy || certificate.identity.is_some() => {
            Err(Error::denied("certificate may not sign policy")
                .got(&certificate.subject)
                .help("make one that may with `towline identity issue-policy`"))
        }
        Purpose::Policy => Ok(()),
    }
}

fn untrusted(source: webpki::Error) -> Error {
    use webpki::Error as Bad;
    let what = match source {
        Bad::CertExpired { .. } => "certificate of the signer had expired",
        Bad::CertNotValidYet { .. } => "certificate of the signer was not valid yet",
        Bad::UnknownIssuer | Bad::InvalidSignatureForPublicKey => {
            "certificate of the signer was signed by an authority that is not trusted"
        }
        Bad::RequiredEkuNotFoundContext(_) => "certificate of the signer has another purpose",
        _ => "certificate of the signer is not accepted",
    };
    Error::denied(what).source(source)
}
