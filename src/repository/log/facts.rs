//! Facts of a training step besides its bytes: metrics, world size, framework.
//!
//! Facts are stored in the log with the name, so that listing runs and choosing steps needs no manifest.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};
use crate::format::wire::{Read, Reader, Writer};
use crate::limits::{FRAMEWORK_LEN_MAX, METRIC_NAME_LEN_MAX, METRICS_MAX};
use crate::name::is_metric_name;

/// A finite number. Two are equal if their bits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Measure(u64);

impl Measure {
    /// Wraps `value`, if it is finite; other values cannot be compared.
    #[must_use]
    pub fn new(value: f64) -> Option<Self> {
        value.is_finite().then(|| Self(value.to_bits()))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl Serialize for Measure {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.get())
    }
}

/// Facts of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct StepFacts {
    #[cfg_attr(feature = "agent", schema(value_type = BTreeMap<String, f64>))]
    metrics: BTreeMap<String, Measure>,
    #[cfg_attr(feature = "agent", schema(value_type = Option<u32>, required))]
    world_size: Option<NonZeroU32>,
    #[cfg_attr(feature = "agent", schema(required))]
    framework: Option<String>,
}

impl StepFacts {
    /// Approximate bytes of memory besides its own size.
    pub(super) fn weight(&self) -> usize {
        let metrics = self.metrics.keys().map(|name| name.len() + size_of::<(String, Measure)>());
        metrics.sum::<usize>() + self.framework.as_ref().map_or(0, String::len)
    }

    /// Sets the metric `name`.
    ///
    /// # Errors
    /// Usage, if the name is not one segment of a NAME, the value is not finite, or there are too many.
    pub fn metric(mut self, name: &str, value: f64) -> Result<Self> {
        if !is_metric_name(name) {
            return Err(Error::usage("invalid name of a metric")
                .expected(format!("[A-Za-z0-9._+=-], at most {METRIC_NAME_LEN_MAX} bytes"))
                .got(format!("{name:?}"))
                .help("for example: loss=0.12"));
        }
        let measure = Measure::new(value).ok_or_else(|| {
            Error::usage("a metric must be a finite number")
                .at(name)
                .got(value)
                .help("leave the metric out: a step without it is skipped where steps are compared by it")
        })?;
        self.metrics.insert(name.to_owned(), measure);
        if self.metrics.len() > METRICS_MAX {
            return Err(Error::usage("too many metrics").expected(format!("at most {METRICS_MAX}")));
        }
        Ok(self)
    }

    /// Sets the number of ranks that saved the step.
    #[must_use]
    pub fn world_size(mut self, ranks: NonZeroU32) -> Self {
        self.world_size = Some(ranks);
        self
    }

    /// Sets the framework that wrote the step.
    ///
    /// # Errors
    /// Usage, if it is empty, too long or holds control characters.
    pub fn framework(mut self, framework: &str) -> Result<Self> {
        if !is_framework(framework) {
            return Err(Error::usage("invalid name of a framework")
                .expected(format!("1 to {FRAMEWORK_LEN_MAX} bytes without control characters"))
                .got(format!("{framework:?}"))
                .help("for example: pytorch"));
        }
        self.framework = Some(framework.to_owned());
        Ok(self)
    }

    /// Takes over from `other` each fact that is not set here.
    ///
    /// # Errors
    /// Usage, if there are too many metrics together.
    pub fn or(mut self, other: &Self) -> Result<Self> {
        for (name, value) in other.metrics() {
            if self.value(name).is_none() {
                self = self.metric(name, value)?;
            }
        }
        if let (None, Some(framework)) = (self.written_by(), other.written_by()) {
            self = self.framework(framework)?;
        }
        self.world_size = self.world_size.or(other.world_size);
        Ok(self)
    }

    /// The value of the metric `name`.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<f64> {
        self.metrics.get(name).map(|measure| measure.get())
    }

    /// The metrics, by name.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, f64)> {
        self.metrics.iter().map(|(name, measure)| (name.as_str(), measure.get()))
    }

    /// Number of ranks, if given.
    #[must_use]
    pub fn ranks(&self) -> Option<NonZeroU32> {
        self.world_size
    }

    /// Framework that wrote it, if given.
    #[must_use]
    pub fn written_by(&self) -> Option<&str> {
        self.framework.as_deref()
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.count(self.metrics.len());
        for (name, measure) in &self.metrics {
            out.string(name.as_bytes()).u64(measure.0);
        }
        out.varint(self.world_size.map_or(0, NonZeroU32::get).into());
        out.string(self.framework.as_deref().unwrap_or_default().as_bytes());
    }

    /// Reads the output of [`StepFacts::write`]; refuses any other encoding, such as unsorted names.
    pub(super) fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let mut facts = Self::default();
        let count = reader.count(10)?;
        if count > METRICS_MAX {
            return Err(reader.malformed("too many metrics"));
        }
        for _ in 0..count {
            let name = reader.text(METRIC_NAME_LEN_MAX)?;
            reader.keep(2 * size_of::<(String, Measure)>() + name.len())?;
            let after = facts.metrics.last_key_value().is_none_or(|(last, _)| last.as_str() < name);
            if !after || !is_metric_name(name) {
                return Err(reader.malformed("bad name of a metric"));
            }
            let value = f64::from_bits(reader.u64()?);
            let measure = Measure::new(value).ok_or_else(|| reader.malformed("metric is not finite"))?;
            facts.metrics.insert(name.to_owned(), measure);
        }
        facts.world_size = NonZeroU32::new(reader.varint32()?);
        let framework = reader.text(FRAMEWORK_LEN_MAX)?;
        reader.keep(framework.len())?;
        if !framework.is_empty() {
            if !is_framework(framework) {
                return Err(reader.malformed("bad name of a framework"));
            }
            facts.framework = Some(framework.to_owned());
        }
        Ok(facts)
    }
}

fn is_framework(text: &str) -> bool {
    (1..=FRAMEWORK_LEN_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn written(facts: &StepFacts) -> Vec<u8> {
        let mut out = Writer::new();
        facts.write(&mut out);
        out.into_bytes()
    }

    fn read(bytes: &[u8]) -> Read<StepFacts> {
        let mut reader = Reader::new(bytes);
        let facts = StepFacts::read(&mut reader)?;
        reader.finish().map(|()| facts)
    }

    proptest! {
        #[test]
        fn facts_survive(
            metrics in prop::collection::btree_map("[a-z0-9_=+-]{1,12}", any::<f64>().prop_filter("finite", |v| v.is_finite()), 0..9),
            ranks in any::<u32>(),
            framework in prop::option::of("[A-Za-z 0-9.]{1,20}"),
        ) {
            let mut facts = StepFacts { world_size: NonZeroU32::new(ranks), ..StepFacts::default() };
            for (name, value) in &metrics {
                facts = facts.metric(name, *value).unwrap();
            }
            if let Some(framework) = &framework {
                facts = facts.framework(framework).unwrap();
            }
            prop_assert_eq!(&read(&written(&facts)).unwrap(), &facts);
            for (name, value) in metrics {
                prop_assert_eq!(facts.value(&name), Some(value));
            }
        }

        #[test]
        fn what_is_read_is_written_the_same(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(facts) = read(&bytes) {
                prop_assert_eq!(written(&facts), bytes);
            }
        }
    }

    #[test]
    fn nothing_told_takes_three_bytes() {
        assert_eq!(written(&StepFacts::default()), [0, 0, 0]);
    }

    #[test]
    fn what_cannot_be_compared_or_listed_is_refused() {
        let usage = |refused: Result<StepFacts>| assert_eq!(refused.unwrap_err().kind(), ErrorKind::Usage);
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            usage(StepFacts::default().metric("loss", value));
        }
        for name in ["", ".", "a/b", "a b", "@", &"m".repeat(METRIC_NAME_LEN_MAX + 1)] {
            usage(StepFacts::default().metric(name, 1.0));
        }
        for framework in ["", "a\nb", &"f".repeat(FRAMEWORK_LEN_MAX + 1)] {
            usage(StepFacts::default().framework(framework));
        }
        let full =
            |count: usize| (0..count).try_fold(StepFacts::default(), |facts, n| facts.metric(&format!("m{n}"), 0.0));
        assert!(full(METRICS_MAX).unwrap().metric("m0", 1.0).is_ok());
        usage(full(METRICS_MAX + 1));
    }

    #[test]
    fn stored_facts_have_one_spelling() {
        let metric = |name: &str, value: f64| {
            let mut out = Writer::new();
            out.string(name.as_bytes()).u64(value.to_bits());
            out.into_bytes()
        };
        let encoded =
            |metrics: &[Vec<u8>]| [vec![u8::try_from(metrics.len()).unwrap()], metrics.concat(), vec![0, 0]].concat();
        assert!(read(&encoded(&[metric("a", 1.0), metric("b", 1.0)])).is_ok());
        for bad in [
            encoded(&[metric("b", 1.0), metric("a", 1.0)]),
            encoded(&[metric("a", 1.0), metric("a", 1.0)]),
            encoded(&[metric("a/b", 1.0)]),
            encoded(&[metric("a", f64::NAN)]),
            vec![0, 0, 1, b'\n'],
        ] {
            assert!(read(&bad).is_err(), "{bad:?}");
        }
    }
}
