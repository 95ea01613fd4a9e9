//! Lists in reports: a folder can give a reason for very many entries.

/// Maximum number of entries.
const ENTRIES_MAX: usize = 1000;
/// Maximum bytes of all entries, before the last one.
const BYTES_MAX: usize = 64 << 10;

/// A list that keeps its first entries and counts the others.
#[derive(Debug, Default)]
pub(super) struct ShortList {
    entries: Vec<String>,
    bytes: usize,
    more: u64,
}

impl ShortList {
    /// Adds what `text` says; if the list is full, it only counts.
    pub(super) fn push(&mut self, text: impl FnOnce() -> String) {
        if self.entries.len() == ENTRIES_MAX || self.bytes > BYTES_MAX {
            self.more += 1;
            return;
        }
        let text = text();
        self.bytes += text.len();
        self.entries.push(text);
    }

    /// Counts `more` without text.
    pub(super) fn and_more(&mut self, more: u64) {
        self.more += more;
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The entries, and how many more there are.
    pub(super) fn into_entries(mut self) -> Vec<String> {
        if self.more > 0 {
            self.entries.push(format!("{} more", self.more));
        }
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_the_first_entries_and_counts_the_others() {
        let mut short = ShortList::default();
        short.push(|| "a".to_owned());
        assert_eq!(short.into_entries(), ["a"]);
        for len in [1, 4096] {
            let mut long = ShortList::default();
            (0..5000).for_each(|_| long.push(|| "a".repeat(len)));
            long.and_more(7);
            let entries = long.into_entries();
            let kept = entries.len() - 1;
            assert!(kept <= ENTRIES_MAX && kept * len <= BYTES_MAX + len, "{kept}");
            assert_eq!(entries[kept], format!("{} more", 5007 - kept));
        }
    }
}
