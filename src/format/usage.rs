//! Usage: what an agent has moved in a month, as it tells others. Signed by its agent, and written again as it grows.

use serde::Serialize;

use super::wire::{Read, Reader, Writer};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::limits::AGENT_NAME_LEN_MAX;

/// Latest version of the body: its lines have GPU seconds.
const VERSION: u8 = 2;
/// Version of a body whose lines have none.
const VERSION_WITHOUT_GPUS: u8 = 1;
/// Maximum bytes of a name or a tenant.
const TEXT_LEN_MAX: usize = 4 << 10;
/// Years that a month can have.
const YEARS: std::ops::RangeInclusive<u16> = 1970..=9999;

/// Maximum number of lines of a report.
const LINES_MAX: usize = 128 << 10;

/// A month of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Month {
    year: u16,
    month: u8,
}

impl Month {
    /// The month of `at`, and the day of it, from 1.
    #[must_use]
    pub fn of(at: Timestamp) -> (Self, u8) {
        let text = at.to_string();
        let month = text.get(..7).and_then(|text| text.parse().ok());
        let day = text.get(8..10).and_then(|day| day.parse().ok());
        (month.unwrap_or(Self { year: *YEARS.start(), month: 1 }), day.unwrap_or(1))
    }
}

impl std::fmt::Display for Month {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04}-{:02}", self.year, self.month)
    }
}

impl std::str::FromStr for Month {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = || Error::usage("this is not a month").expected("YEAR-MONTH, such as 2026-11").got(text);
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let (year, month) = text.split_once('-').ok_or_else(malformed)?;
        if (year.len(), month.len()) != (4, 2) || !digits(year) || !digits(month) {
            return Err(malformed());
        }
        let month =
            Self { year: year.parse().map_err(|_| malformed())?, month: month.parse().map_err(|_| malformed())? };
        if YEARS.contains(&month.year) && (1..=12).contains(&month.month) { Ok(month) } else { Err(malformed()) }
    }
}

/// Direction of bytes, as the agent that counts them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Received.
    In,
    /// Sent.
    Out,
}

/// Bytes of one kind on one day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageTotals {
    /// Bytes.
    pub bytes: u64,
    /// Requests to the repository's store; 0 between agents.
    pub requests: u64,
    /// GPU seconds that did not idle: a job's GPUs, by the time in which its data came before it had them.
    pub gpu_seconds: u64,
}

impl UsageTotals {
    /// Adds `more`.
    pub fn add(&mut self, more: Self) {
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.requests = self.requests.saturating_add(more.requests);
        self.gpu_seconds = self.gpu_seconds.saturating_add(more.gpu_seconds);
    }

    /// The part of it that is beyond `other`.
    #[must_use]
    pub fn beyond(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            requests: self.requests.saturating_sub(other.requests),
            gpu_seconds: self.gpu_seconds.saturating_sub(other.gpu_seconds),
        }
    }
}

/// Kind of bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageKey {
    /// Day of the month, from 1.
    pub day: u8,
    /// Direction.
    pub way: Direction,
    /// Site of the other agent; empty for the repository's store.
    pub site: String,
    /// Run, or name of another tree, whose chunks they are; empty for everything else: protocol, log, index, maps.
    pub name: String,
    /// Tenant of the name; empty if it has none.
    pub tenant: String,
}

/// Usage of a month, by one run of an agent's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageReport {
    /// Repository in which it lies, and whose trees it names.
    pub repository: RepositoryId,
    /// Month.
    pub month: Month,
    /// Start of the process; tells its reports from those of others.
    pub started: Timestamp,
    /// Rises with each report of the process.
    pub sequence: u64,
    /// Time of the report, by the agent's clock.
    pub at: Timestamp,
    /// Lines, by their keys, which rise.
    pub lines: Vec<(UsageKey, UsageTotals)>,
}

impl UsageReport {
    /// Its bytes, which the agent signs.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        // Programs that know only the first version read what it can say.
        let has_gpus = self.lines.iter().any(|(_, totals)| totals.gpu_seconds > 0);
        let version = if has_gpus { VERSION } else { VERSION_WITHOUT_GPUS };
        writer.u8(version).bytes(&self.repository.to_bytes()).signed(self.at.0);
        writer.string(self.month.to_string().as_bytes()).signed(self.started.0).varint(self.sequence);
        writer.count(self.lines.len());
        for (key, totals) in &self.lines {
            writer.u8(key.day).u8(u8::from(key.way == Direction::Out));
            for text in [&key.site, &key.name, &key.tenant] {
                writer.string(text.as_bytes());
            }
            writer.varint(totals.bytes).varint(totals.requests);
            if has_gpus {
                writer.varint(totals.gpu_seconds);
            }
        }
        writer.into_bytes()
    }

    /// Time in the bytes of a report, to verify its signature before the rest is decoded.
    ///
    /// # Errors
    /// Damaged; unsupported, for a later version.
    pub fn time(bytes: &[u8]) -> Result<Timestamp> {
        let mut reader = Reader::new(bytes);
        Self::read_version(&mut reader)?;
        let _repository: [u8; 16] = reader.array()?;
        Ok(Timestamp(reader.signed()?))
    }

    fn read_version(reader: &mut Reader<'_>) -> Result<u8> {
        let version = reader.u8()?;
        if !(VERSION_WITHOUT_GPUS..=VERSION).contains(&version) {
            return Err(Error::unsupported("usage was written by another version")
                .expected(format!("{VERSION_WITHOUT_GPUS} to {VERSION}"))
                .got(version)
                .help("use the same version of towline everywhere"));
        }
        Ok(version)
    }

    /// Reads its bytes, within `memory` bytes of memory.
    ///
    /// # Errors
    /// Damaged; unsupported, for a later version; exhausted.
    pub fn decode(bytes: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(bytes, memory);
        let version = Self::read_version(&mut reader)?;
        let repository = RepositoryId::from_bytes(reader.array()?);
        let at = Timestamp(reader.signed()?);
        let month = reader.text(AGENT_NAME_LEN_MAX)?.parse().map_err(|_| reader.malformed("month is malformed"))?;
        let report = Self {
            repository,
            at,
            month,
            started: Timestamp(reader.signed()?),
            sequence: reader.varint()?,
            lines: read_lines(&mut reader, version == VERSION)?,
        };
        reader.finish()?;
        Ok(report)
    }
}

fn read_lines(reader: &mut Reader<'_>, has_gpus: bool) -> Read<Vec<(UsageKey, UsageTotals)>> {
    // Each has at least a day, a direction, three lengths and two or three numbers.
    let count = reader.count(7 + usize::from(has_gpus))?;
    if count > LINES_MAX {
        return Err(reader.malformed("report has too many lines"));
    }
    let mut last: Option<UsageKey> = None;
    reader.kept_list(count, |reader| {
        let day = reader.u8()?;
        if !(1..=31).contains(&day) {
            return Err(reader.malformed("month has no such day"));
        }
        let way = if reader.flag()? { Direction::Out } else { Direction::In };
        let site = reader.kept_text(AGENT_NAME_LEN_MAX)?;
        let key =
            UsageKey { day, way, site, name: reader.kept_text(TEXT_LEN_MAX)?, tenant: reader.kept_text(TEXT_LEN_MAX)? };
        if last.as_ref().is_some_and(|last| *last >= key) {
            return Err(reader.malformed("lines do not rise"));
        }
        last = Some(key.clone());
        let (bytes, requests) = (reader.varint()?, reader.varint()?);
        let gpu_seconds = if has_gpus { reader.varint()? } else { 0 };
        Ok((key, UsageTotals { bytes, requests, gpu_seconds }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn report() -> UsageReport {
        let key = |day, way, site: &str, name: &str| UsageKey {
            day,
            way,
            site: site.to_owned(),
            name: name.to_owned(),
            tenant: "team-a".to_owned(),
        };
        UsageReport {
            repository: RepositoryId::from_bytes([7; 16]),
            month: "2026-11".parse().unwrap(),
            started: Timestamp(1),
            sequence: 3,
            at: Timestamp(1_795_000_000_000_000_000),
            lines: vec![
                (key(1, Direction::In, "", "run-7"), UsageTotals { bytes: 1 << 40, requests: 9, gpu_seconds: 0 }),
                (key(1, Direction::Out, "west", ""), UsageTotals { bytes: 5, ..UsageTotals::default() }),
                (key(30, Direction::In, "", "run-7"), UsageTotals::default()),
            ],
        }
    }

    #[test]
    fn reports_read_back() {
        let bytes = report().encode();
        assert_eq!(UsageReport::decode(&bytes, u64::MAX).unwrap(), report());
        assert_eq!(UsageReport::time(&bytes).unwrap(), report().at);
        assert_eq!(UsageReport::decode(&bytes, 100).unwrap_err().kind(), ErrorKind::Exhausted);
        for len in 0..bytes.len() {
            assert!(UsageReport::decode(&bytes[..len], u64::MAX).is_err(), "{len}");
        }
        let mut later = bytes;
        later[0] = 3;
        assert_eq!(UsageReport::decode(&later, u64::MAX).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn only_reports_with_gpu_seconds_need_the_second_version() {
        assert_eq!(report().encode()[0], VERSION_WITHOUT_GPUS);
        let mut with = report();
        with.lines[2].1.gpu_seconds = 7_200;
        let bytes = with.encode();
        assert_eq!(bytes[0], VERSION);
        assert_eq!(UsageReport::decode(&bytes, u64::MAX).unwrap(), with);
        for len in 0..bytes.len() {
            assert!(UsageReport::decode(&bytes[..len], u64::MAX).is_err(), "{len}");
        }
    }

    #[test]
    fn lines_rise_and_days_are_of_a_month() {
        for change in [
            |report: &mut UsageReport| report.lines.swap(0, 1),
            |report: &mut UsageReport| {
                report.lines[2].0.day = 32;
            },
        ] {
            let mut changed = report();
            change(&mut changed);
            assert_eq!(UsageReport::decode(&changed.encode(), u64::MAX).unwrap_err().kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn months_are_of_the_calendar() {
        let (month, day) = Month::of(Timestamp(1_795_606_140_000_000_000));
        assert_eq!((month.to_string(), day), ("2026-11".to_owned(), 25));
        for bad in ["2026", "2026-13", "2026-00", "26-11", "2026-1", "+026-11", "2026-11-25", ""] {
            assert_eq!(bad.parse::<Month>().unwrap_err().kind(), ErrorKind::Usage, "{bad}");
        }
    }
}
