//! Small certificate authority: a folder with its certificate and its key.

use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CustomExtension, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, date_time_ymd,
};

use super::certificate::{Certificate, POLICY_USAGE};
use super::files;
use super::pem;
use super::tls::SERVER_NAME;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::tree::{Readers, create_file, replace_file};

/// Default lifetime of an authority's certificate: ten years.
pub const AUTHORITY_DAYS: u32 = 3650;
/// Default lifetime of an agent's certificate: a year.
pub const AGENT_DAYS: u32 = 365;
/// Maximum lifetime of any certificate: a century, far from where two-digit years end.
pub const DAYS_MAX: u32 = 36_500;

/// Default lifetime of the certificate of a policy key: a year.
pub const POLICY_DAYS: u32 = 365;
/// Number of the extension with the usages of a key (RFC 5280, 4.2.1.12).
const EXTENDED_KEY_USAGE: &[u64] = &[2, 5, 29, 37];

/// Backdating of certificates, since clocks of machines differ.
const SKEW: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// Subject of an agent's certificate.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The agent.
    pub identity: &'a Identity,
    /// Its DNS names beside [`SERVER_NAME`], for clients that are no agents.
    pub dns_names: &'a [String],
}

impl<'a> From<&'a Identity> for Subject<'a> {
    fn from(identity: &'a Identity) -> Self {
        Self { identity, dns_names: &[] }
    }
}

/// Signer of agents' certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Certificates for each agent's `ca.crt`: this authority first, perhaps others that are trusted too.
    trusted: String,
    certificate: Certificate,
}

impl Authority {
    /// Creates an authority called `name` in `folder`: `ca.crt`, and `ca.key` for its owner alone.
    ///
    /// # Errors
    /// Conflict, if one exists: nothing is overwritten.
    pub fn create(folder: &Path, name: &str, days: u32, now: Timestamp) -> Result<Self> {
        if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
            // Limit of X.509 on a common name (RFC 5280, appendix A.1, ub-common-name).
            return Err(Error::usage("name of the authority is malformed").expected("1 to 64 characters"));
        }
        let mut params = params(days, now)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = new_key()?;
        let made = params.self_signed(&key).map_err(unsigned)?;
        files::make_folder(folder)?;
        let taken = |error: Error| match error.kind() {
            ErrorKind::Conflict => Error::conflict("an authority exists already")
                .at(folder.display())
                .help("use it, or create one in another folder: agents trust only the authorities in their ca.crt")
                .source(error),
            _ => error,
        };
        // The key first: it must never be lost to another process.
        create_file(&folder.join(files::AUTHORITY_KEY), &key.serialize_pem(), Readers::Owner).map_err(taken)?;
        create_file(&folder.join(files::AUTHORITY), &made.pem(), Readers::All).map_err(taken)?;
        let certificate = Certificate::read(made.der())?;
        Ok(Self { issuer: Issuer::new(params, key), trusted: made.pem(), certificate })
    }

    /// Opens the authority in `folder`.
    ///
    /// # Errors
    /// Not found, if there is none; damaged, if its files are not a certificate and its key.
    pub fn open(folder: &Path) -> Result<Self> {
        let (path, key_path) = (folder.join(files::AUTHORITY), folder.join(files::AUTHORITY_KEY));
        let missing = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::not_found("there is no authority")
                .at(folder.display())
                .help(format!("towline identity init --authority {}", folder.display()))
                .source(error),
            _ => error,
        };
        let key = files::read(&key_path).map_err(missing)?;
        let malformed = |source| Error::damaged("key is malformed").at(key_path.display()).source(source);
        let key = KeyPair::from_pem(&key).map_err(malformed)?;
        let trusted = files::read(&path).map_err(missing)?;
        let chain = pem::certificates(&trusted, &path)?;
        let first = chain.first().ok_or_else(|| Error::damaged("file holds no certificate").at(path.display()))?;
        if !pem::is_key_of(&key, first)? {
            return Err(Error::damaged("ca.key is not the key of the first certificate in ca.crt").at(folder.display()));
        }
        let certificate = Certificate::read(first)?;
        let issuer = Issuer::from_ca_cert_der(first, key);
        let issuer =
            issuer.map_err(|source| Error::damaged("certificate is unusable").at(path.display()).source(source))?;
        Ok(Self { issuer, trusted, certificate })
    }

    /// Its own certificate.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Writes a key that signs policies to `folder`, with its certificate: `policy.key` and `policy.crt`. Agents refuse
    /// connections with it.
    ///
    /// # Errors
    /// Conflict, if one exists; usage, for a lifetime that is too long or outlives the authority.
    pub fn issue_policy_key(&self, folder: &Path, days: u32, now: Timestamp) -> Result<Certificate> {
        let mut params = self.lasting(days, now)?;
        params.distinguished_name.push(DnType::CommonName, "policy");
        params.custom_extensions = vec![CustomExtension::from_oid_content(EXTENDED_KEY_USAGE, sequence_of_usage())];
        let key = new_key()?;
        let made = params.signed_by(&key, &self.issuer).map_err(unsigned)?;
        files::make_folder(folder)?;
        let taken = |error: Error| match error.kind() {
            ErrorKind::Conflict => Error::conflict("a policy key exists already")
                .at(folder.display())
                .help("use it, or make one in another folder: each is valid until it expires or is revoked")
                .source(error),
            _ => error,
        };
        create_file(&folder.join(files::POLICY_KEY), &key.serialize_pem(), Readers::Owner).map_err(taken)?;
        create_file(&folder.join(files::POLICY_CERTIFICATE), &made.pem(), Readers::All).map_err(taken)?;
        Certificate::read(made.der())
    }

    /// Signs a certificate for the key of `request`, which a workload with the SPIFFE id `identity` has made. Returns it in PEM. What
    /// else the request says is ignored.
    ///
    /// # Errors
    /// Usage, if the request is malformed, or not signed with its key, and for a lifetime that outlives the authority.
    pub fn sign(&self, request: &str, identity: &Identity, (days, now): (u32, Timestamp)) -> Result<String> {
        let asked = CertificateSigningRequestParams::from_pem(request)
            .map_err(|source| Error::usage("certificate request is malformed").source(source))?;
        let made = self.agent_params(&identity.into(), days, now)?.signed_by(&asked.public_key, &self.issuer);
        Ok(made.map_err(unsigned)?.pem())
    }

    /// Certificates of the trusted authorities, in PEM: this one first.
    #[must_use]
    pub fn trusted(&self) -> &str {
        &self.trusted
    }

    /// Parameters of the certificate of an agent or a workload.
    fn agent_params(&self, subject: &Subject<'_>, days: u32, now: Timestamp) -> Result<CertificateParams> {
        let mut params = self.lasting(days, now)?;
        let uri = subject.identity.to_string().try_into();
        let uri = uri.map_err(|source: rcgen::Error| Error::usage("identity is no URI").source(source))?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        // Other programs check servers by a DNS name, agents by the URI.
        let others = subject.dns_names.iter().map(String::as_str).filter(|name| *name != SERVER_NAME);
        for name in [SERVER_NAME].into_iter().chain(others) {
            let malformed = || {
                Error::usage("DNS name is malformed")
                    .expected("1 to 253 letters, digits, - and .")
                    .got(format!("{name:.253?}"))
            };
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.*".contains(&byte);
            if !(1..=253).contains(&name.len()) || !name.bytes().all(plain) {
                return Err(malformed());
            }
            let read = name.try_into().map_err(|source: rcgen::Error| malformed().source(source))?;
            params.subject_alt_names.push(SanType::DnsName(read));
        }
        // Limit of X.509 on a common name (RFC 5280, appendix A.1, ub-common-name); paths of SPIFFE ids may be longer.
        let name: String = subject.identity.agent().chars().take(64).collect();
        params.distinguished_name.push(DnType::CommonName, name);
        // An agent is both client and server.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(params)
    }

    /// Parameters of a certificate that expires before the authority's.
    fn lasting(&self, days: u32, now: Timestamp) -> Result<CertificateParams> {
        let mut params = params(days, now)?;
        let until = Timestamp(params.not_after.unix_timestamp().saturating_mul(1_000_000_000));
        if until > self.certificate.not_after {
            return Err(Error::usage("certificate would outlive its authority")
                .expected(format!("an end before {}", self.certificate.not_after))
                .got(until)
                .help("lower --days"));
        }
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        Ok(params)
    }

    /// Writes a new key and certificate for `subject` to `folder`: `tls.key`, `tls.crt` and `ca.crt`, each whole or
    /// not at all. Existing files are replaced only with `replace`.
    ///
    /// # Errors
    /// Conflict, if a certificate exists; usage, for a lifetime that is too long or outlives the authority.
    pub fn issue(
        &self,
        subject: &Subject<'_>,
        folder: &Path,
        (days, now): (u32, Timestamp),
        replace: bool,
    ) -> Result<Certificate> {
        let params = self.agent_params(subject, days, now)?;
        let key = new_key()?;
        let made = params.signed_by(&key, &self.issuer).map_err(unsigned)?;
        files::make_folder(folder)?;
        let path = folder.join(files::CERTIFICATE);
        if !replace && path.try_exists().unwrap_or(true) {
            let error = Error::conflict("a certificate exists already").at(path.display());
            return Err(error.help(format!("towline identity rotate {}", folder.display())));
        }
        // An agent that reads the files in between finds a key that does not match, and keeps its old credentials.
        replace_file(&folder.join(files::AUTHORITY), &self.trusted, Readers::All)?;
        replace_file(&folder.join(files::KEY), &key.serialize_pem(), Readers::Owner)?;
        replace_file(&path, &made.pem(), Readers::All)?;
        Certificate::read(made.der())
    }
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Authority({})", self.certificate.subject)
    }
}

/// The one usage of a policy key as DER: a sequence of one object identifier. Written here, since the number does not
/// fit the library's type.
fn sequence_of_usage() -> Vec<u8> {
    let len = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    let identifier = [&[0x06, len(POLICY_USAGE)], POLICY_USAGE].concat();
    [&[0x30, len(&identifier)], identifier.as_slice()].concat()
}

pub(super) fn new_key() -> Result<KeyPair> {
    // P-256: every other tool reads it, and it is fast enough for a handshake.
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|source| Error::other("cannot make a key").source(source))
}

fn unsigned(source: rcgen::Error) -> Error {
    Error::other("cannot sign the certificate").source(source)
}

fn params(days: u32, now: Timestamp) -> Result<CertificateParams> {
    if !(1..=DAYS_MAX).contains(&days) {
        let error = Error::usage("certificate lifetime is too long");
        return Err(error.expected(format!("1 to {DAYS_MAX}")).got(days));
    }
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let begin = date_time_ymd(1970, 1, 1) + now.since(Timestamp(0));
    params.not_before = begin - SKEW;
    params.not_after = begin + DAY * days;
    Ok(params)
}
