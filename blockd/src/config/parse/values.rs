//! Single values of the configuration.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use blockd_control::config::SizeWish;
use blockd_media::error::Error;
use blockd_media::names::check_socket_path;
use blockd_media::units::{MAX_SIZE, exact, parse_size};

use super::super::file::Amount;
use super::{Key, Source};

/// Hundredths of a ratio like 2, 1.5 or 1.25.
pub(super) fn percent_of_ratio(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(part) || part.len() > 2 {
        return None;
    }
    let tenths = if part.len() == 1 { 10 } else { 1 };
    let percent = whole.parse::<u64>().ok()?.checked_mul(100)?;
    let percent = percent.checked_add(part.parse::<u64>().ok()? * tenths)?;
    (100..=100_000).contains(&percent).then_some(percent)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Source<'_> {
    pub(super) fn address(&self, key: Key<'_>, text: &str) -> Result<SocketAddr, Error> {
        let allowed = "HOST:PORT with a host that is known here, like 127.0.0.1:10809";
        let mut found = text.to_socket_addrs().map_err(|_| self.refuse(key, text, allowed))?;
        found.next().ok_or_else(|| self.refuse(key, text, allowed))
    }

    pub(super) fn absolute(&self, key: Key<'_>, text: &str) -> Result<PathBuf, Error> {
        let path = PathBuf::from(text);
        if !path.is_absolute() || text.contains('\0') {
            return Err(self.refuse(key, text, "an absolute path"));
        }
        Ok(path)
    }

    pub(super) fn socket(&self, key: Key<'_>, text: &str) -> Result<PathBuf, Error> {
        let path = self.absolute(key, text)?;
        check_socket_path(&path).map_err(|allowed| self.refuse(key, text, allowed))?;
        Ok(path)
    }

    pub(super) fn mode(&self, key: Key<'_>, text: &str) -> Result<u32, Error> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
        mode.ok_or_else(|| self.refuse(key, text, "permission bits in octal, like 0660"))
    }

    pub(super) fn count(
        &self,
        key: Key<'_>,
        value: i64,
        (low, high): (i64, i64),
    ) -> Result<usize, Error> {
        usize::try_from(value)
            .ok()
            .filter(|_| (low..=high).contains(&value))
            .ok_or_else(|| self.refuse(key, value, format!("from {low} to {high}")))
    }

    pub(super) fn size_wish(&self, key: Key<'_>, amount: &Amount) -> Result<SizeWish, Error> {
        if let Amount::Text(text) = amount
            && let Some(digits) = text.strip_suffix('%')
        {
            let percent = digits.parse().ok().filter(|percent| (1..=99).contains(percent));
            let allowed = "from 1% to 99% of what is free, or a size";
            return percent.map(SizeWish::OfFree).ok_or_else(|| self.refuse(key, text, allowed));
        }
        Ok(match self.size(key, amount, (0, MAX_SIZE))? {
            0 => SizeWish::Existing,
            bytes => SizeWish::Bytes(bytes),
        })
    }

    pub(super) fn size(
        &self,
        key: Key<'_>,
        amount: &Amount,
        (low, high): (u64, u64),
    ) -> Result<u64, Error> {
        let bytes = match amount {
            Amount::Bytes(bytes) => u64::try_from(*bytes).ok(),
            Amount::Text(text) => parse_size("size", text).ok(),
        };
        bytes.filter(|bytes| (low..=high).contains(bytes)).ok_or_else(|| {
            let range = match (low, high) {
                (0, MAX_SIZE) => "a size in bytes, or a text like \"10G\"".to_owned(),
                _ => format!("a size from {} to {}, like \"10M\"", exact(low), exact(high)),
            };
            self.refuse(key, amount, range)
        })
    }

    /// A number of `ms`, `s`, `m` or `h`, from `low` to `high` seconds.
    pub(super) fn duration(
        &self,
        key: Key<'_>,
        text: &str,
        low: u64,
        high: u64,
    ) -> Result<Duration, Error> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        let factor = match unit {
            "ms" => Some(1),
            "s" => Some(1_000),
            "m" => Some(60_000),
            "h" => Some(3_600_000),
            _ => None,
        };
        let count: Option<u64> = digits.parse().ok();
        count
            .zip(factor)
            .and_then(|(count, factor)| count.checked_mul(factor))
            .map(Duration::from_millis)
            .filter(|found| (low * 1000..=high * 1000).contains(&millis(*found)))
            .ok_or_else(|| {
                let allowed = format!("a time from {low}s to {high}s, like 500ms, 10s or 2m");
                self.refuse(key, text, allowed)
            })
    }
}
