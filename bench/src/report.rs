//! The table of figures beside their budgets.

use serde_json::{Value, json};

/// The target of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Budget {
    /// Time or memory: at most so much. A noisy machine can miss it, so a miss is only shown.
    AtMost(f64),
    /// The same as a multiple of what this machine needs for something simple, measured in the same
    /// run: at most `times` times `each`, which is in the row's unit.
    Times {
        /// How many times.
        times: f64,
        /// Its name.
        of: &'static str,
        /// How much one takes.
        each: f64,
    },
    /// A count, which no noise touches: exactly so much. A miss fails the run.
    Exactly(f64),
    /// No target: the figure explains another one.
    None,
}

/// One line of the table.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// The name of the figure.
    pub name: String,
    /// How much.
    pub figure: f64,
    /// The unit of the value.
    pub unit: &'static str,
    /// How much it may be.
    pub budget: Budget,
}

impl Row {
    /// A figure with a budget.
    #[must_use]
    pub fn new(name: impl Into<String>, figure: f64, unit: &'static str, budget: Budget) -> Self {
        Self { name: name.into(), figure, unit, budget }
    }

    /// Whether the budget holds; `None` if there is none.
    #[must_use]
    pub fn met(&self) -> Option<bool> {
        match self.budget {
            Budget::AtMost(most) => Some(self.figure <= most),
            Budget::Times { times, each, .. } => Some(self.figure <= times * each),
            // Both are whole numbers.
            Budget::Exactly(count) => Some((self.figure - count).abs() < 1e-9),
            Budget::None => None,
        }
    }

    /// Whether a run with this line has failed.
    #[must_use]
    pub fn fails(&self) -> bool {
        matches!(self.budget, Budget::Exactly(_)) && self.met() == Some(false)
    }

    /// Returns the figure as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let (kind, budget) = match self.budget {
            Budget::AtMost(most) => ("at_most", Some(most)),
            Budget::Times { times, each, .. } => ("times", Some(times * each)),
            Budget::Exactly(count) => ("exactly", Some(count)),
            Budget::None => ("none", None),
        };
        json!({
            "name": self.name, "figure": self.figure, "unit": self.unit,
            "budget": budget, "budget_kind": kind, "met": self.met(),
        })
    }

    fn line(&self) -> String {
        let budget = match self.budget {
            Budget::AtMost(most) => format!("<= {} {}", number(most), self.unit),
            Budget::Times { times, of, each } => {
                let found = number(self.figure / each);
                format!("{found} <= {} x {of}", number(times))
            }
            Budget::Exactly(count) => format!("= {}", number(count)),
            Budget::None => "-".to_owned(),
        };
        let met = match self.met() {
            Some(true) => "met",
            Some(false) => "NOT MET",
            None => "-",
        };
        let figure = format!("{} {}", number(self.figure), self.unit);
        format!("{:<62} {figure:>16}  {budget:<24} {met}", self.name)
    }
}

/// Prints the lines under a title.
pub fn print(title: &str, rows: &[Row]) {
    println!("\n{title}");
    for row in rows {
        println!("  {}", row.line());
    }
}

/// A number with as many digits as mean something.
fn number(value: f64) -> String {
    if (value - value.round()).abs() < 1e-9 || value.abs() >= 100.0 {
        format!("{value:.0}")
    } else if value.abs() >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_counts_fail_a_run() {
        assert!(Row::new("a", 1.0, "allocations", Budget::Exactly(0.0)).fails());
        assert!(!Row::new("a", 0.0, "allocations", Budget::Exactly(0.0)).fails());
        assert!(!Row::new("a", 2.0, "ns", Budget::AtMost(1.0)).fails());
        let times = |figure| {
            Row::new("a", figure, "ns", Budget::Times { times: 3.0, of: "miss", each: 100.0 })
        };
        assert_eq!([times(299.0).met(), times(301.0).met()], [Some(true), Some(false)]);
        assert!(!times(301.0).fails());
        assert_eq!(Row::new("a", 2.0, "ns", Budget::AtMost(1.0)).met(), Some(false));
        assert_eq!(Row::new("a", 2.0, "ns", Budget::None).met(), None);
    }
}
