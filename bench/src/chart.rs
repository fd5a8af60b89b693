//! A chart of ratios, as SVG: horizontal bars from 0 with intervals as whiskers, a line at 1, and
//! marks at targets. Equal figures give equal text.

use std::fmt::Write as _;

use crate::stats::Ratio;

/// Pixels.
const WIDTH: f64 = 880.0;
const MARGIN: f64 = 16.0;
const LINE: f64 = 18.0;
const TOP: f64 = 52.0;
const ROW: f64 = 40.0;
const BAR: f64 = 14.0;

/// The most intervals that the axis is divided into, so that its numbers do not touch.
const MOST_STEPS: f64 = 8.0;

/// The chart has a ground of its own, and colours for light and for dark pages. They are named
/// twice and not as variables, which few viewers know.
const STYLE: &str = "\
.ground{fill:#fff}text{fill:#1f2328}.head{font-size:15px;font-weight:bold}.bar{fill:#8fb8e0}
.grid{stroke:#d0d7de}.one,.whisker{stroke:#1f2328;stroke-width:1.5}
.target{stroke:#b3261e;stroke-width:2;stroke-dasharray:4 2}
@media (prefers-color-scheme:dark){
.ground{fill:#14181d}text{fill:#e6edf3}.bar{fill:#2f5f8f}.grid{stroke:#3a424b}
.one,.whisker{stroke:#e6edf3}.target{stroke:#ff8a80}}
";

/// One ratio.
#[derive(Clone, PartialEq, Debug)]
pub struct Bar {
    /// The measured figure, in words.
    pub label: String,
    /// Its ends are equal if there is no interval.
    pub ratio: Ratio,
    /// The ratio that is claimed, if one is.
    pub target: Option<f64>,
    /// Words behind the number.
    pub note: String,
}

/// Ratios with a common axis.
#[derive(Clone, PartialEq, Debug)]
pub struct Chart {
    /// The name of its file, without `.svg`.
    pub name: String,
    /// The first line.
    pub title: String,
    /// Lines below the title.
    pub notes: Vec<String>,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

impl Bar {
    fn value(&self) -> String {
        let Ratio { median, low, high } = self.ratio;
        let mut value = if !median.is_finite() {
            "not measured".to_owned()
        } else if low < high {
            format!("{median:.2} [{low:.2}, {high:.2}]")
        } else {
            format!("{median:.2}")
        };
        if !self.note.is_empty() {
            let _ = write!(value, ", {}", self.note);
        }
        value
    }

    fn draw(&self, text: &mut String, top: f64, axis: &Axis) {
        label(text, (MARGIN, top + 12.0), "", &self.label);
        label(text, (WIDTH - MARGIN, top + 12.0), "end", &self.value());
        let Ratio { median, low, high } = self.ratio;
        if median.is_finite() {
            let (y, width) = (top + 18.0, axis.x(median) - MARGIN);
            let _ = writeln!(
                text,
                "<rect class=\"bar\" x=\"{MARGIN}\" y=\"{y}\" width=\"{width:.1}\" \
                 height=\"{BAR}\"/>"
            );
            if low < high {
                let (low, high, y) = (axis.x(low), axis.x(high), y + BAR / 2.0);
                line(text, "whisker", (low, y), (high, y));
                for end in [low, high] {
                    line(text, "whisker", (end, y - 4.0), (end, y + 4.0));
                }
            }
        }
        // Lines across the labels would make them hard to read.
        for (class, ratio) in [("one", Some(1.0)), ("target", self.target)] {
            if let Some(x) = ratio.map(|ratio| axis.x(ratio)) {
                line(text, class, (x, top + 15.0), (x, top + 35.0));
            }
        }
    }
}

impl Chart {
    /// Draws it.
    #[must_use]
    pub fn svg(&self) -> String {
        let axis = Axis::of(&self.bars);
        let top = TOP + LINE * (self.notes.len() as f64 + 1.0);
        let bottom = top + ROW * self.bars.len() as f64;
        let height = bottom + MARGIN;
        let title = escaped(&self.title);
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\" \
             role=\"img\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n\
             <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
             <text x=\"{MARGIN}\" y=\"28\" class=\"head\">{title}</text>\n"
        );
        for (note, number) in self.notes.iter().zip(0_u32..) {
            label(&mut text, (MARGIN, TOP + LINE * f64::from(number)), "", note);
        }
        for tick in axis.ticks() {
            label(&mut text, (axis.x(tick), top - 6.0), "middle", &tick.to_string());
            line(&mut text, "grid", (axis.x(tick), top), (axis.x(tick), bottom));
        }
        for (bar, row) in self.bars.iter().zip(0_u32..) {
            bar.draw(&mut text, top + ROW * f64::from(row), &axis);
        }
        text += "</svg>\n";
        text
    }
}

/// From 0 to a multiple of its step.
struct Axis {
    step: f64,
    most: f64,
}

impl Axis {
    fn of(bars: &[Bar]) -> Self {
        let of = |bar: &Bar| [bar.ratio.median, bar.ratio.high, bar.target.unwrap_or(0.0)];
        let figures = bars.iter().flat_map(of);
        // Something is right of the line at 1, even if no ratio is.
        let largest = figures.filter(|figure| figure.is_finite()).fold(1.25, f64::max);
        let mut steps = [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0].into_iter();
        let step = steps.find(|step| largest / step <= MOST_STEPS).unwrap_or(largest / MOST_STEPS);
        Self { step, most: (largest / step).ceil() * step }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let ticks = (0_u32..).map(|number| f64::from(number) * self.step);
        ticks.take_while(|tick| *tick < self.most + self.step / 2.0)
    }

    fn x(&self, ratio: f64) -> f64 {
        MARGIN + (WIDTH - 2.0 * MARGIN) * (ratio / self.most).clamp(0.0, 1.0)
    }
}

fn line(text: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        text,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1}\" x2=\"{x2:.1}\" y2=\"{y2}\"/>"
    );
}

fn label(text: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escaped(words);
    let anchor = match anchor {
        "" => String::new(),
        anchor => format!(" text-anchor=\"{anchor}\""),
    };
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y}\"{anchor}>{words}</text>");
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Fails unless the text is well-formed XML, as far as charts need it: every element is closed
    /// in order, every attribute is quoted, and no bare `<` or `&` is left.
    pub(crate) fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        for (index, part) in svg.split('<').enumerate() {
            let Some((tag, content)) = part.split_once('>') else {
                assert!(index == 0 && part.is_empty(), "not closed: <{part}");
                continue;
            };
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else {
                let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
                assert!(name.chars().all(|c| c.is_ascii_lowercase()), "<{tag}>");
                // Between quotes is every second piece; the others end with `=` or close the tag.
                let mut outside = attributes.split('"').step_by(2).map(str::trim);
                assert!(attributes.matches('"').count() % 2 == 0, "<{tag}>");
                assert!(outside.all(|o| o.is_empty() || o == "/" || o.ends_with('=')));
                if !tag.ends_with('/') {
                    open.push(name);
                }
            }
            let entities = ["amp;", "lt;", "gt;"];
            let mut bare = content.split('&').skip(1);
            assert!(bare.all(|rest| entities.iter().any(|e| rest.starts_with(e))), "{content}");
            assert!(!open.is_empty() || content.trim().is_empty(), "outside: {content}");
        }
        assert!(open.is_empty(), "{open:?}");
    }

    fn bar(label: &str, (median, low, high): (f64, f64, f64)) -> Bar {
        let ratio = Ratio { median, low, high };
        Bar { label: label.to_owned(), ratio, target: Some(2.0), note: "met".to_owned() }
    }

    #[test]
    fn bars_and_whiskers_are_as_long_as_their_figures() {
        let bars = vec![
            bar("a & b", (1.0, 0.5, 1.5)),
            bar("c", (2.0, 2.0, 2.0)),
            bar("d", (f64::NAN, f64::NAN, f64::NAN)),
        ];
        let (name, title) = ("x".to_owned(), "1 < 2".to_owned());
        let chart = Chart { name, title, notes: vec!["n".to_owned()], bars };
        let svg = chart.svg();
        assert_well_formed(&svg);
        for part in [
            "<title>1 &lt; 2</title>",
            ">a &amp; b</text>",
            // Half of the axis, which ends at 2.
            "<rect class=\"bar\" x=\"16\" y=\"106\" width=\"424.0\" height=\"14\"/>",
            "<line class=\"whisker\" x1=\"228.0\" y1=\"113\" x2=\"652.0\" y2=\"113\"/>",
            "<line class=\"one\" x1=\"440.0\" y1=\"103\" x2=\"440.0\" y2=\"123\"/>",
            "<line class=\"target\" x1=\"864.0\" y1=\"103\" x2=\"864.0\" y2=\"123\"/>",
            ">1.00 [0.50, 1.50], met</text>",
            ">2.00, met</text>",
            ">not measured, met</text>",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("NaN"), "{svg}");
        assert_eq!(svg, chart.svg());
    }

    #[test]
    fn the_axis_has_few_round_steps_and_holds_all() {
        let axis = |largest| {
            let axis = Axis::of(&[bar("", (largest, 0.0, largest))]);
            (axis.step, axis.most)
        };
        assert_eq!(
            [0.1, 2.1, 4.5, 28.0].map(axis),
            [(0.25, 2.0), (0.5, 2.5), (1.0, 5.0), (5.0, 30.0)]
        );
        assert_eq!(Axis::of(&[]).ticks().collect::<Vec<_>>().len(), 6);
    }
}
