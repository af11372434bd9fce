"""The accountants: from events, each repeated a number of times, to epsilon at delta.

| module       | composes                                          | used by the accounting       |
|--------------|---------------------------------------------------|------------------------------|
| `pld`        | privacy loss distributions                        | `every-trial`, and `proven`  |
|              |                                                   | where nothing is selected    |
| `proven`     | certified Rényi divergences of accepted updates   | `proven`, privacy filters    |
| `rdp`        | Rényi divergences at integer orders, as in the    | `published`                  |
|              | paper; the conversion to epsilon that others use  |                              |
| `selective`  | one accepted update, from above and from below    | `proven`                     |
| `noise_tail` | what the missing tail of the noise adds to delta  | all                          |

`dpsur.privacy.accounting` names the accountings and says what each charges and assumes.
"""
