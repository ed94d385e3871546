//! The figures of the benchmark, and bars for those that share a unit, in SVG.

use anyhow::{Context as _, Result};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;

const ROW: i32 = 24;
const MARGIN: i32 = 8;
/// Length of the longest bar in pixels; its number is to the right of it.
const BAR: i32 = 410;
const NUMBER: i32 = 110;
const TEXT: (&str, i32) = ("sans-serif", 13);
/// Maximum of the average width of a letter of `TEXT`, in pixels.
const LETTER: i32 = 7;

const MET: RGBColor = RGBColor(70, 110, 160);
const MISSED: RGBColor = RGBColor(190, 80, 60);

/// Draws one bar for each figure; a black line marks the target, and the bar of a figure above its target is red.
pub fn bars(figures: &[&Figure]) -> Result<String> {
    let longest =
        figures.iter().map(|figure| figure.value.max(figure.target.unwrap_or(0.0))).fold(0.0, f64::max);
    // The position at which bars begin, to the right of the names.
    let name = figures.iter().map(|figure| figure.what.chars().count()).max().unwrap_or_default();
    let left = i32::try_from(name).context("too long a name for a plot")? * LETTER + 2 * MARGIN;
    let x = |value: f64| left + (f64::from(BAR) * value.max(0.0) / longest.max(f64::MIN_POSITIVE)) as i32;
    let rows = i32::try_from(figures.len()).context("too many figures for a plot")?;
    let mut svg = String::new();
    {
        let size = [left + BAR + NUMBER, rows * ROW + 2 * MARGIN].map(i32::cast_unsigned).into();
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| {
            for (figure, row) in figures.iter().zip(0..) {
                let top = MARGIN + row * ROW;
                let (above, below, middle) = (top + 4, top + ROW - 4, top + ROW / 2);
                let text = |horizontal| {
                    TEXT.into_font().into_text_style(&area).pos(Pos::new(horizontal, VPos::Center))
                };
                let color = if figure.is_missed() { MISSED } else { MET };
                area.draw(&Text::new(figure.what.clone(), (left - MARGIN, middle), text(HPos::Right)))?;
                area.draw(&Rectangle::new(
                    [(left, above), (x(figure.value).max(left + 1), below)],
                    color.filled(),
                ))?;
                if let Some(target) = figure.target {
                    area.draw(&PathElement::new([(x(target), top + 1), (x(target), top + ROW - 1)], BLACK))?;
                }
                let end = x(figure.value.max(figure.target.unwrap_or(0.0))) + MARGIN;
                area.draw(&Text::new(number(figure.value, &figure.unit), (end, middle), text(HPos::Left)))?;
            }
            area.present()
        });
        drawn.context("cannot draw a plot")?;
    }
    Ok(svg)
}

/// Colors of lines, in turn.
const COLORS: [RGBColor; 6] = [
    MET,
    MISSED,
    RGBColor(80, 140, 80),
    RGBColor(150, 100, 160),
    RGBColor(190, 150, 50),
    RGBColor(90, 90, 90),
];

/// Draws a line for each name: values by second, from 0 up.
pub fn lines(named: &[(String, &[(f64, f64)])], unit: &str) -> Result<String> {
    let all = || named.iter().flat_map(|(_, values)| values.iter());
    let end = all().map(|(second, _)| *second).fold(1.0, f64::max);
    let top = all().map(|(_, value)| *value).fold(1.0, f64::max) * 1.1;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (800, 260)).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| {
            let mut chart = ChartBuilder::on(&area)
                .margin(MARGIN)
                .x_label_area_size(32)
                .y_label_area_size(60)
                .build_cartesian_2d(0.0..end / 60.0, 0.0..top)?;
            chart.configure_mesh().light_line_style(WHITE).x_desc("minutes").y_desc(unit).draw()?;
            for ((name, values), color) in named.iter().zip(COLORS.into_iter().cycle()) {
                let points: Vec<_> = values.iter().map(|(second, value)| (second / 60.0, *value)).collect();
                chart
                    .draw_series(std::iter::once(PathElement::new(points, color)))?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color));
            }
            chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).draw()?;
            area.present()
        });
        drawn.context("cannot draw a plot")?;
    }
    Ok(svg)
}

/// One figure, as the benchmark writes it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Figure {
    pub group: String,
    pub what: String,
    pub unit: String,
    pub value: f64,
    /// First and third quartile of the rounds; `None` if there are no rounds.
    #[serde(default)]
    pub quartiles: Option<[f64; 2]>,
    /// Maximum for the value; `None` if there is no target.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether the value is above its target.
    pub fn is_missed(&self) -> bool {
        self.target.is_some_and(|target| self.value > target)
    }
}

/// Formats a value with its unit: three decimals for ratios, one for values below 100, else none.
pub fn number(value: f64, unit: &str) -> String {
    let digits = if unit == "x" { 3 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$} {unit}")
}
