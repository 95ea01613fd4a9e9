//! Huge pages of shared memory, which most systems do not use by default.

/// Setting of the system for them (<https://docs.kernel.org/admin-guide/mm/transhuge.html#hugepages-in-tmpfs-shmem>).
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Remark for a system that keeps huge pages from shared memory that asks for them: filling and mapping it then takes several times as
/// long. None, if it does not, or its setting cannot be read.
#[must_use]
pub fn small_pages() -> Option<String> {
    let setting = std::fs::read_to_string(SETTING).ok()?;
    has_small_pages(&setting)
        .then(|| format!("shared memory is in small pages, which is slow: echo advise > {SETTING}"))
}

fn has_small_pages(setting: &str) -> bool {
    ["[never]", "[deny]"].iter().any(|chosen| setting.contains(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_decides() {
        assert!(has_small_pages("always within_size advise [never] deny force\n"));
        assert!(has_small_pages("always within_size advise never [deny] force\n"));
        for setting in ["always within_size [advise] never deny force\n", "[always] within_size advise never\n", ""] {
            assert!(!has_small_pages(setting));
        }
    }
}
